"""Resolution before anything starts: the user's arguments, a platform and the model's facts become a configuration.

Torch-free. `srv launch` resolves for this machine, `srv plan` for any device; a refusal comes before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from srv.args.resolve import resolve
from srv.args.statement import Resolved, UserInput
from srv.errors import ModelError, PlatformUnavailable, Refusal, Rejection
from srv.models.locate import locate
from srv.models.read import read_facts
from srv.planning.target import Target, this_machine
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts


class ResolvedPlan(NamedTuple):
    """The user's arguments, resolved for a target. `model` is None only if none was needed."""

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    notes: tuple[str, ...]


class LaunchContext(NamedTuple):
    """Everything that a launch on this machine needs. `notes` are logged as warnings."""

    manifest: Manifest
    device: DeviceFacts
    model: ModelFacts
    resolved: Resolved
    reason: str
    notes: tuple[str, ...]

    @property
    def platform(self) -> str:
        return self.manifest.name


def resolve_launch(user: UserInput) -> LaunchContext:
    """Resolve for this machine. Refusal with everything that conflicts with a launch."""
    plan = resolve_plan(user, this_machine)
    assert plan.model is not None
    target = plan.target
    return LaunchContext(target.manifest, target.device, plan.model, plan.resolved, target.reason, plan.notes)


def resolve_plan(
    user: UserInput, find_target: Callable[[str | None, str], Target], *, model_needed: bool = True
) -> ResolvedPlan:
    """Find device and model and resolve. Refusal with everything that can be checked at once.

    `find_target(text of --device or None, who set it)` raises Refusal or PlatformUnavailable.
    """
    faults: list[Rejection] = list(user.rejections)
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
    try:  # even without a device or a model, so that their faults are reported with all others
        resolved = resolve_arguments(user, target, model)
    except Refusal as refusal:
        raise Refusal(list(dict.fromkeys([*faults, *refusal.rejections]))) from refusal
    if faults or target is None:
        raise Refusal(faults)
    return ResolvedPlan(target, model, resolved, (*user.notes, *target.notes))


def resolve_arguments(user: UserInput, target: Target | None, model: ModelFacts | None) -> Resolved:
    """Resolve for a target, or for no platform at all."""
    if target is None:
        return resolve(user, model=model)
    return resolve(
        user,
        manifest=target.manifest,
        device=target.device,
        model=model,
        backends=target.extra,
        chosen_because=target.reason,
    )


def _find_model(user: UserInput, needed: bool) -> ModelFacts | None:
    path = user.value("model_path")
    try:
        return read_facts(locate(path, user.value("revision")))
    except ModelError as error:
        if error.code == "no_model" and not needed:
            return None  # no demo model: values that depend on the model remain unknown
        raise


def _missing_files(user: UserInput) -> list[Rejection]:
    """Rejections of files that do not exist; their contents are checked when they are read."""
    named = {argument: user.value(argument) for argument in ("tokenizer_path", "chat_template")}
    return [
        _fault(user, argument, "not_found", "there is no such file or folder", "Correct the path, or leave it out.")
        for argument, path in named.items()
        if path is not None and not Path(path).expanduser().exists()
    ]


def _fault(user: UserInput, argument: str, code: str, reason: str, remedy: str) -> Rejection:
    value = user.value(argument)
    sentence = remedy if remedy.endswith((".", "?")) else f"{remedy}."  # exceptions add it only when they are printed
    return Rejection(code, argument, None if value is None else str(value), _source(user, argument), reason, sentence)


def _source(user: UserInput, argument: str) -> str:
    statements = [each for each in user.statements if each.argument == argument]
    return max(statements, key=lambda each: each.origin).source if statements else "automatic choice"
