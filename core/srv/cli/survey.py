"""What is so, before anything is started: the user's words, this machine's platform, the model's facts, resolved.

Torch-free. Raises `Refusal`, `PlatformUnavailable` or `ModelError`; nothing has been started then.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from srv.args.resolve import resolve
from srv.args.sources import gather
from srv.args.statement import Resolved
from srv.models.facts import ModelFacts
from srv.models.locate import locate
from srv.models.read import read_facts
from srv.platform.choose import choose
from srv.platform.facts import FAMILIES, DeviceFacts
from srv.platform.manifest import Manifest
from srv.platform.registry import find_backends, find_platforms


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a launch is made from. `why` the platform was chosen; `notes` are worth a warning."""

    manifest: Manifest
    device: DeviceFacts
    model: ModelFacts
    resolved: Resolved
    why: str
    notes: tuple[str, ...]

    @property
    def platform(self) -> str:
        return self.manifest.name


def survey(namespace: argparse.Namespace, environment: Mapping[str, str]) -> Situation:
    user = gather(namespace, environment)
    asked = user.value("device")
    chosen = choose(asked, find_platforms())
    manifest = chosen.found.loaded
    model = read_facts(locate(user.value("model_path"), user.value("revision")))
    resolved = resolve(
        user,
        manifest=manifest,
        device=chosen.device,
        model=model,
        backends={family: find_backends(manifest.name, family) for family in FAMILIES},
        chosen_because=chosen.why,
    )
    return Situation(manifest, chosen.device, model, resolved, chosen.why, (*user.notes, *chosen.notes))
