"""Asking resolution: is this value taken on this device, and if not, why? The very function that launch calls.

No model file, no device and no torch; a plugin that answers wrongly leaves as its own `PluginError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.resolve import resolve
from srv.args.rules.reserve import RESERVED_MEMORY
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Refusal, Rejected
from srv.memory.budget import estimate
from srv.models.facts import ModelFacts
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest

SOURCE = "the user"
POOL_TOO_SMALL = "pool_too_small"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Taken (`code` is empty), or refused with a stable code and the reason."""

    code: str = ""
    reason: str = ""

    @property
    def taken(self) -> bool:
        return not self.code


def said(argument: str, values: Iterable[Any]) -> tuple[UserStatement, ...]:
    """Statements as a user would have made them on the command line."""
    return tuple(UserStatement(argument, value, Origin.COMMAND_LINE, SOURCE) for value in values)


def verdict(
    argument: str, value: Any, models: Sequence[ModelFacts], on: tuple[Manifest, DeviceFacts] | None
) -> Verdict:
    """What resolution makes of one value, on a device or (None) by core's own rules.

    The first model that lets it pass decides; if none does, the first one's refusal stands.
    """
    manifest, device = on or (None, None)
    refusals: list[Verdict] = []
    for model in models:
        try:
            resolve(UserInput(said(argument, (value,))), manifest=manifest, device=device, model=model)
        except Refusal as refusal:
            about = [each for each in refusal.rejections if each.what == argument] or list(refusal.rejections)
            refusals.append(_verdict(about[0]))
        else:
            return Verdict()
    return refusals[0]


def pool_verdict(argument: str, value: Any, model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Verdict:
    """Whether weights and the smallest pool fit on a device beside a value that is taken, by `srv plan`'s rule."""
    try:
        found = resolve(UserInput(said(argument, (value,))), manifest=manifest, device=device, model=model)
        estimate(found.config, model, device, int(found.quantities[RESERVED_MEMORY].total))
    except Refusal as refusal:
        small = [_verdict(each) for each in refusal.rejections if each.code == POOL_TOO_SMALL]
        return small[0] if small else Verdict()
    return Verdict()


def planned_verdicts(values: Mapping[str, tuple[Any, ...]], model: ModelFacts) -> dict[tuple[str, str], Verdict]:
    """The refusals of planned arguments, all asked at once: (argument, value as shown) -> verdict.

    No platform is asked, since core refuses a planned argument before any platform is.
    """
    statements = tuple(each for name, tried in values.items() for each in said(name, tried))
    try:
        resolve(UserInput(statements), model=model)
    except Refusal as refusal:
        return {(each.what, each.value or ""): _verdict(each) for each in refusal.rejections}
    return {}


def _verdict(rejected: Rejected) -> Verdict:
    return Verdict(rejected.code, rejected.reason)


@dataclass(frozen=True)
class Baseline:
    """What a device comes to if nobody says anything: the values, or the refusal that even that meets."""

    values: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict = Verdict()


def baseline(model: ModelFacts, manifest: Manifest, device: DeviceFacts) -> Baseline:
    """Resolve on a device without a word from the user: whether it can be, and to which values.

    The values are those of no model in particular, so that what follows from the sample's sizes is nobody's value.
    """
    try:
        resolve(UserInput(), manifest=manifest, device=device, model=model)
        resolved = resolve(UserInput(), manifest=manifest, device=device)
    except Refusal as refusal:
        return Baseline(verdict=_verdict(refusal.rejections[0]))
    return Baseline({name: resolved.config.get(name) for name in ARGUMENTS})
