"""One variant of a platform, seen with one model: what records of features and pairs are judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.seen import Facts
from srv.models.facts import ModelFacts
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv_matrix.judge import baseline
from srv_matrix.records import Kind, Level, Record, Status


@dataclass(frozen=True)
class Ground:
    """One variant of a platform with the model that pairs are judged with, and what nobody's word comes to there."""

    manifest: Manifest
    variant: str
    device: DeviceFacts
    facts: Facts
    values: Mapping[str, Any]

    def record(
        self,
        kind: Kind,
        name: str,
        facts: tuple[Status, Status],
        why: tuple[str, str] = ("", ""),
        declared_by: str = "",
    ) -> Record:
        """A record of this variant; `facts`: what is declared, and what core has."""
        declared_by = declared_by or f"platform {self.manifest.name}"
        silent = facts[0] in (Status.UNKNOWN, Status.PLANNED)
        return Record(
            f"{kind}:{name}",
            kind,
            self.manifest.name,
            self.variant,
            *facts,
            reason_code=why[0],
            reason=why[1],
            declared_by="" if silent else declared_by,
            base=None if silent else Level.E1,
        )


def make_ground(manifest: Manifest, variant: str, model: ModelFacts) -> Ground:
    """The ground of a variant's own profile."""
    device = manifest.facts.profiles[variant]
    facts = Facts(device, model, manifest.facts.capabilities(device))
    own = baseline(model, manifest, device).values
    values = {name: own.get(name, argument.default) for name, argument in ARGUMENTS.items()}
    return Ground(manifest, variant, device, facts, values)
