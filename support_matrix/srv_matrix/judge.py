"""Judge whether a value is accepted on a device, with the same resolution that a launch uses.

Needs no model files, no device and no torch. A faulty plugin raises its own `PluginError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.args.resolve import resolve
from srv.args.rules.reserve import RESERVED_MEMORY
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Refusal, Rejection
from srv.planning.budget import estimate
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts

SOURCE = "the user"
POOL_TOO_SMALL = "pool_too_small"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted (`code` is empty), or refused with a stable code and a reason."""

    code: str = ""
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return not self.code


def _one_value(argument: str, value: Any) -> UserInput:
    """The input as if a user had set this value on the command line, and what it has an effect only with."""
    return _user_input(with_prerequisite(argument, value).items())


def _user_input(values: Iterable[tuple[str, Any]]) -> UserInput:
    return UserInput(tuple(UserStatement(name, value, Origin.COMMAND_LINE, SOURCE) for name, value in values))


def verdict(
    argument: str, value: Any, models: Sequence[ModelFacts], on: tuple[Manifest, DeviceFacts] | None
) -> Verdict:
    """The verdict of resolution on one value, on a device or (None) by core's own rules.

    The value is accepted if it is accepted with any of the models; otherwise the verdict is that of the first model.
    """
    manifest, device = on or (None, None)
    refusals: list[Verdict] = []
    for model in models:
        try:
            resolve(_one_value(argument, value), manifest=manifest, device=device, model=model)
        except Refusal as refusal:
            about = [each for each in refusal.rejections if each.what == argument] or list(refusal.rejections)
            refusals.append(_verdict(about[0]))
        else:
            return Verdict()
    return refusals[0]


def pool_verdict(argument: str, value: Any, model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Verdict:
    """Whether weights and the smallest KV pool fit on a device with an accepted value, by the rules of `srv plan`."""
    try:
        found = resolve(_one_value(argument, value), manifest=manifest, device=device, model=model)
        estimate(found.config, model, device, int(found.quantities[RESERVED_MEMORY].total))
    except Refusal as refusal:
        too_small = [_verdict(each) for each in refusal.rejections if each.code == POOL_TOO_SMALL]
        return too_small[0] if too_small else Verdict()
    return Verdict()


def planned_verdicts(values: Mapping[str, tuple[Any, ...]], model: ModelFacts) -> dict[tuple[str, str], Verdict]:
    """The refusals of planned arguments, from a single resolution: (argument, value as shown) -> verdict.

    No platform is involved, because core refuses a planned argument first.
    """
    try:
        resolve(_user_input((name, value) for name, tried in values.items() for value in tried), model=model)
    except Refusal as refusal:
        return {(each.what, each.value or ""): _verdict(each) for each in refusal.rejections}
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
    try:
        resolve(UserInput(), manifest=manifest, device=device, model=model)
        resolved = resolve(UserInput(), manifest=manifest, device=device)
    except Refusal as refusal:
        return Baseline(verdict=_verdict(refusal.rejections[0]))
    return Baseline({name: resolved.config.get(name) for name in ARGUMENTS})
