"""Judge whether a value is accepted on a device: by the resolution and the checks that a launch makes before weights.

Needs no model files, no device and no torch. A faulty plugin raises its own `PluginError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from srv.args.backends import BACKEND_SLOTS
from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.args.resolve import resolve
from srv.args.rules import inert, weights
from srv.args.rules.reserve import RESERVED_MEMORY
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Refusal, Rejection
from srv.planning.budget import estimate
from srv.planning.launchable import check_launch
from srv.planning.target import Target
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv.platform.placeholder import NO_DEVICE_CODE
from srv.specs import ModelFacts
from srv_matrix.sample import quantized_models, special_models

SOURCE = "the user"
POOL_TOO_SMALL = "pool_too_small"
BACKEND_IGNORES = "backend_ignores"
TOO_FEW_DEVICES = "too_few_devices"
NOT_INSTALLED = "not_installed"  # of this machine, about which cells say nothing
_MANY_DEVICES = 64
OF_ANY_MODEL = ("planned", "capability_missing")  # the codes of refusals that no other model changes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted (`code` is empty), or refused with a stable code and a reason."""

    code: str = ""
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return not self.code


def _one_value(argument: str, value: Any, more: Mapping[str, Any] | None = None) -> UserInput:
    """The input as if a user had set this value on the command line, and what it has an effect only with."""
    return _user_input({**with_prerequisite(argument, value), **(more or {})}.items())


def _user_input(values: Iterable[tuple[str, Any]]) -> UserInput:
    return UserInput(tuple(UserStatement(name, value, Origin.COMMAND_LINE, SOURCE) for name, value in values))


def verdict(
    argument: str,
    value: Any,
    models: Sequence[ModelFacts],
    on: tuple[Manifest, DeviceFacts] | None,
    more: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict of resolution on one value, on a device or (None) by core's own rules. `more`: further values set.

    The value is accepted if it is accepted with any of the models, or, where it has no effect on the first one, with
    one that has layers of other kinds, or where it is a method of other checkpoints, with one of these. Otherwise the
    verdict is one that holds for any model, or that of the first of these others on which the value has an effect, or
    that of the first.
    """
    refusals: list[Verdict] = []
    decisive: Verdict | None = None
    effective: Verdict | None = None
    pending = deque(models)
    user = _one_value(argument, value, more)
    tried = {statement.argument for statement in user.statements}
    while pending:
        model = pending.popleft()
        try:
            _launch(user, on, model)
        except Refusal as refusal:
            about_it = [rejection for rejection in refusal.rejections if rejection.what == argument]
            about = about_it or list(refusal.rejections)
            if about[0].code == NOT_INSTALLED:
                return Verdict()
            refusals.append(_verdict(about[0]))
            if len(refusals) == 1:
                codes = {rejection.code for rejection in about}
                pending += special_models() if inert.CODE in codes else ()
                pending += quantized_models() if weights.OTHER_METHOD in codes else ()
            of_value = about_it or [rejection for rejection in refusal.rejections if rejection.what in tried]
            if (
                of_value
                and of_value[0].code != inert.CODE
                and not any(model is sample_model for sample_model in models)
            ):
                effective = effective or _verdict(of_value[0])
            # perhaps of this checkpoint alone
            other = any(rejection.code == weights.OTHER_METHOD for rejection in about_it)
            if not other and (of_any := [rejection for rejection in about_it if rejection.code in OF_ANY_MODEL]):
                decisive = _verdict(of_any[0])
                break
        else:
            return Verdict()
    return decisive or effective or refusals[0]


def _launch(user: UserInput, on: tuple[Manifest, DeviceFacts] | None, model: ModelFacts) -> None:
    """What a launch does before it reads weights. Raises its Refusal."""
    manifest, device = on or (None, None)
    resolved = resolve(user, manifest=manifest, device=device, model=model)
    if manifest is None or device is None:
        return
    check = check_launch(Target(manifest, device, "", {}), model, resolved, None)
    if refusals := [
        refusal for refusal in check.refusals if refusal.code != NO_DEVICE_CODE
    ]:  # cells say so of their platform
        raise Refusal(refusals)


def pool_verdict(argument: str, value: Any, model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Verdict:
    """Refused if weights and the smallest KV pool do not fit on a device with this value, as `srv plan` does."""
    try:
        resolved = resolve(_one_value(argument, value), manifest=manifest, device=device, model=model)
        estimate(resolved.config, model, device, int(resolved.quantities[RESERVED_MEMORY].total))
    except Refusal as refusal:
        too_small = [_verdict(rejection) for rejection in refusal.rejections if rejection.code == POOL_TOO_SMALL]
        return too_small[0] if too_small else Verdict()
    return Verdict()


def condition(
    argument: str, value: Any, refused: Verdict, models: Sequence[ModelFacts], on: tuple[Manifest, DeviceFacts]
) -> str:
    """What a device accepts a refused value with: more devices of its kind, or a backend that reads the argument.

    Empty if neither is the reason of the refusal, or neither helps.
    """
    manifest, device = on
    if refused.code == TOO_FEW_DEVICES:
        many = replace(device, count=_MANY_DEVICES)
        return "on a host with enough devices" if verdict(argument, value, models, (manifest, many)).accepted else ""
    if refused.code == BACKEND_IGNORES:
        family = ARGUMENTS[argument].arg.read_by or ""
        general = next(names[-1] for kind, names in BACKEND_SLOTS.values() if kind == family)
        for spec in manifest.facts.backends.get(family, ()):
            reads = argument in spec.arguments
            if reads and verdict(argument, value, models, on, {general: spec.name}).accepted:
                return f"with {general} {spec.name}"
    return ""


def planned_verdicts(values: Mapping[str, tuple[Any, ...]], model: ModelFacts) -> dict[tuple[str, str], Verdict]:
    """The refusals of planned arguments, from a single resolution: (argument, value as shown) -> verdict.

    No platform is involved, because core refuses a planned argument first.
    """
    try:
        resolve(_user_input((name, value) for name, tried in values.items() for value in tried), model=model)
    except Refusal as refusal:
        return {(rejection.what, rejection.value or ""): _verdict(rejection) for rejection in refusal.rejections}
    return {}


def _verdict(rejected: Rejection) -> Verdict:
    return Verdict(rejected.code, rejected.reason)


@dataclass(frozen=True)
class Baseline:
    """The result of resolution on a device if nothing is set: the values, or the refusal."""

    values: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict = Verdict()


def baseline(model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Baseline:
    """Resolve on a device with nothing set.

    The values are resolved without a model, so that they do not depend on the sizes of the sample model.
    """
    judged = model_verdict(model, manifest, device)
    if not judged.accepted:
        return Baseline(verdict=judged)
    try:
        resolved = resolve(UserInput(), manifest=manifest, device=device)
    except Refusal as refusal:
        return Baseline(verdict=_verdict(refusal.rejections[0]))
    return Baseline({name: resolved.config.get(name) for name in ARGUMENTS})


def model_verdict(model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Verdict:
    """The verdict of a launch on a device if nothing is set."""
    try:
        _launch(UserInput(), (manifest, device), model)
    except Refusal as refusal:
        return _verdict(refusal.rejections[0])
    return Verdict()
