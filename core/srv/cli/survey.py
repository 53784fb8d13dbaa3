"""What is so, before anything is started: the user's words, a platform, the model's facts, all resolved.

Torch-free, and nothing has been started when it refuses: `srv launch` surveys this machine, `srv plan` any.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from srv.args.resolve import resolve
from srv.args.sources import gather
from srv.args.statement import Resolved, UserInput
from srv.errors import ModelError, PlatformUnavailable, Refusal, Rejected
from srv.models.facts import ModelFacts
from srv.models.locate import locate
from srv.models.read import read_facts
from srv.platform.choose import choose
from srv.platform.facts import BackendSpec, DeviceFacts
from srv.platform.manifest import Manifest
from srv.platform.registry import find_all_backends, find_platforms


class Target(NamedTuple):
    """A platform with its device, why it is that one, third parties' backends by family, and warnings."""

    manifest: Manifest
    device: DeviceFacts
    why: str
    extra: Mapping[str, tuple[BackendSpec, ...]]
    notes: tuple[str, ...] = ()

    def backends(self, family: str) -> tuple[BackendSpec, ...]:
        """All backends of a family."""
        return (*self.manifest.facts.backends.get(family, ()), *self.extra.get(family, ()))


class Judged(NamedTuple):
    """The user's words, resolved for a target. `model` is None only where none was needed."""

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    notes: tuple[str, ...]


class Situation(NamedTuple):
    """Everything that a launch on this machine is made from. `notes` are worth a warning."""

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
    """What a launch would be made from. Refusal with everything that stands against it."""
    judged = judge(gather(namespace, environment), this_machine)
    assert judged.model is not None
    target = judged.target
    return Situation(target.manifest, target.device, judged.model, judged.resolved, target.why, judged.notes)


def judge(user: UserInput, find_target: Callable[[str | None, str], Target], *, model_needed: bool = True) -> Judged:
    """Find device and model and resolve. Refusal with everything that can be judged at once.

    `find_target(text of --device or None, who said it)` raises Refusal or PlatformUnavailable.
    """
    faults: list[Rejected] = list(user.rejections)
    target = model = None
    try:
        target = find_target(user.value("device"), _source(user, "device"))
    except Refusal as refusal:
        faults += refusal.rejections
    except PlatformUnavailable as error:
        faults.append(_fault(user, "device", error.code, error.reason, error.remedy))
    try:
        model = _find_model(user, model_needed)
    except ModelError as error:
        faults.append(_fault(user, "model_path", error.code, f"{error.what}: {error.reason}", error.remedy))
    faults += _missing_files(user)
    try:  # even without a device or a model, so that their faults are told beside all others
        resolved = resolve_for(user, target, model)
    except Refusal as refusal:
        raise Refusal(list(dict.fromkeys([*faults, *refusal.rejections]))) from refusal
    if faults or target is None:
        raise Refusal(faults)
    return Judged(target, model, resolved, (*user.notes, *target.notes))


def resolve_for(user: UserInput, target: Target | None, model: ModelFacts | None) -> Resolved:
    """Resolve for a target, or for no platform at all."""
    if target is None:
        return resolve(user, model=model)
    return resolve(
        user,
        manifest=target.manifest,
        device=target.device,
        model=model,
        backends=target.extra,
        chosen_because=target.why,
    )


def this_machine(text: str | None, who: str) -> Target:
    """The platform asked for, or the best available one, as its probe finds it here."""
    chosen = choose(text, find_platforms(), who=who)
    return make_target(chosen.found.loaded, chosen.device, chosen.why, chosen.notes)


def make_target(manifest: Manifest, device: DeviceFacts, why: str, notes: tuple[str, ...] = ()) -> Target:
    return Target(manifest, device, why, find_all_backends(manifest.name), notes)


def _find_model(user: UserInput, needed: bool) -> ModelFacts | None:
    path = user.value("model_path")
    try:
        return read_facts(locate(path, user.value("revision")))
    except ModelError as error:
        if error.code == "no_model" and not needed:
            return None  # no demo model: what depends on the model stays open
        raise


def _missing_files(user: UserInput) -> list[Rejected]:
    """Files that other arguments name and that are not there; what is in them is judged by their readers."""
    named = {argument: user.value(argument) for argument in ("tokenizer_path", "chat_template")}
    return [
        _fault(user, argument, "not_found", "there is no such file or folder", "Correct the path, or leave it out.")
        for argument, path in named.items()
        if path is not None and not Path(path).expanduser().exists()
    ]


def _fault(user: UserInput, argument: str, code: str, reason: str, remedy: str) -> Rejected:
    value = user.value(argument)
    sentence = remedy if remedy.endswith((".", "?")) else f"{remedy}."  # errors end theirs when they print it
    return Rejected(code, argument, None if value is None else str(value), _source(user, argument), reason, sentence)


def _source(user: UserInput, argument: str) -> str:
    said = [each for each in user.statements if each.argument == argument]
    return max(said, key=lambda each: each.origin).source if said else "automatic choice"
