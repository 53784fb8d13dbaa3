"""Build the records: for each argument, value, platform and variant, what is declared, implemented and tested.

What a platform declares is determined by the functions that also validate a launch (`judge`). Core refuses a planned
argument (one that is not implemented yet) before any platform is involved, so only the platform's `Support` tells what
it declares for it. This module writes no page.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.args.support import SupportStatus, by_argument_on, support_of_argument, support_of_value
from srv.platform.facts import DeviceFacts, Support
from srv.platform.manifest import Manifest
from srv.platform.op_choice import NAMED_BY, argument_names
from srv.specs import ModelFacts
from srv_matrix.judge import (
    BACKEND_IGNORES,
    POOL_TOO_SMALL,
    Baseline,
    Verdict,
    baseline,
    condition,
    planned_verdicts,
    pool_verdict,
    verdict,
)
from srv_matrix.published import Table
from srv_matrix.records import Evidence, Key, Level, Record, Status, lower
from srv_matrix.sample import small_model
from srv_matrix.sweep import is_closed, values_of

PLANNED = "planned"
ACCEPTED = Verdict()
MEMORY_ARGUMENTS = ("mem_fraction_static", "max_total_tokens")  # they limit the size of the KV pool
POOL_TOO_SMALL_REASON = (
    "accepted if weights and the smallest KV pool fit; with the defaults of all other arguments they do not fit on "
    "this device, for a model of three billion parameters"
)
_ABSENT = frozenset(
    {"capability_missing", "unsupported", "unknown_backend", "no_backend", "dtype_missing"}
    | {"no_device_indices", BACKEND_IGNORES}
)


@dataclass(frozen=True)
class PlatformVariant:
    """One variant of a platform with its baseline. `tested`: numbers that tests have set arguments to, by argument."""

    manifest: Manifest
    variant: str
    device: DeviceFacts
    capabilities: frozenset[str]
    support: Mapping[str, tuple[Support, ...]]
    base: Baseline
    tested: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(frozen=True, slots=True)
class TriedValue:
    """One value with core's verdict, and the verdict on a platform's variant.

    `limit`: why the value is accepted only under a condition: no model of ordinary size fits on the device with it,
    although one does with the defaults, or `on_device` accepts it with a value of another argument or more devices.
    """

    value: Any
    core: Verdict
    on_device: Verdict
    limit: Verdict = ACCEPTED


def judge_arguments(
    manifests: Iterable[Manifest], models: Sequence[ModelFacts], evidence: Sequence[Evidence] = ()
) -> tuple[Record, ...]:
    """Every record of these platforms by the rules alone, in the order of arguments, then platforms, then variants.

    `models`: the models with which values are judged, the most common one first. `evidence`: each number that it names
    has a cell.
    """
    manifests = tuple(manifests)
    platforms = [variant for manifest in manifests for variant in _variants(manifest, models[0], evidence)]
    planned = _judge_planned(platforms, models[0])
    records: list[Record] = []
    for argument in ARGUMENTS.values():
        core: dict[str, Verdict] = {}
        for platform in platforms:
            tried = _try(argument, platform, models, core, planned)
            records += _records(argument, platform, tried)
    return tuple(records)


def with_tables_and_evidence(
    records: Sequence[Record], tables: Sequence[Table], evidence: Sequence[Evidence]
) -> tuple[Record, ...]:
    """The records of arguments with what others publish of them, and with what was run."""
    return tuple(_with_values(with_evidence(_with_published(records, tables), evidence)))


def _variants(manifest: Manifest, model: ModelFacts, evidence: Sequence[Evidence]) -> Iterator[PlatformVariant]:
    for variant in manifest.variants:
        device = manifest.facts.profiles[variant]
        support = by_argument_on(manifest.facts.support, variant)
        capabilities = manifest.facts.capabilities(device)
        base = baseline(model, manifest, device)
        tested = tested_numbers(evidence, manifest.name, variant)
        yield PlatformVariant(manifest, variant, device, capabilities, support, base, tested)


def tested_numbers(evidence: Sequence[Evidence], platform: str, variant: str) -> Mapping[str, tuple[Any, ...]]:
    """Numbers that evidence of a variant names, by argument. Each is a cell, in addition to the values always tried."""
    numbers: dict[str, list[Any]] = {}
    cells = (cell for line in evidence if (line.platform, line.variant) == (platform, variant) for cell in line.covers)
    for cell in dict.fromkeys(cells):
        name, has_value, text = cell.partition("=")
        argument = ARGUMENTS.get(name)
        if argument is not None and has_value and argument.kind.base in (int, float):
            with contextlib.suppress(ValueError):  # an invalid value has no cell, so the evidence is refused
                numbers.setdefault(name, []).append(argument.parse(text))
    return {name: tuple(values) for name, values in numbers.items()}


def _judge_planned(platforms: Sequence[PlatformVariant], model: ModelFacts) -> dict[tuple[str, str], Verdict]:
    planned = [argument for argument in ARGUMENTS.values() if argument.arg.planned]
    values = {
        argument.name: tuple(value for platform in platforms for value in _values_to_try(argument, platform))
        for argument in planned
    }
    return planned_verdicts(values, model)


def _try(
    argument: Argument,
    platform: PlatformVariant,
    models: Sequence[ModelFacts],
    core: dict[str, Verdict],
    planned: Mapping[tuple[str, str], Verdict],
) -> list[TriedValue]:
    """Judge every value. `core` caches core's own verdicts by value, because they are the same on all platforms."""
    if argument.arg.planned:
        values = _values_to_try(argument, platform)
        verdicts = [planned.get((argument.name, argument.show(value)), Verdict()) for value in values]
        return [TriedValue(value, answer, answer) for value, answer in zip(values, verdicts, strict=True)]
    tried: list[TriedValue] = []
    for value in _values_to_try(argument, platform):
        shown = argument.show(value)
        if shown not in core:
            core[shown] = verdict(argument.name, value, models, None)
        on_device = platform.base.verdict
        if on_device.accepted and core[shown].code == PLANNED:
            on_device = core[shown]  # no platform is asked about it
        elif on_device.accepted:
            on_device = verdict(argument.name, value, models, (platform.manifest, platform.device))
        tried.append(TriedValue(value, core[shown], *_conditional(argument, value, on_device, models, platform)))
    return tried


def _conditional(
    argument: Argument, value: Any, on_device: Verdict, models: Sequence[ModelFacts], platform: PlatformVariant
) -> tuple[Verdict, Verdict]:
    """The verdict on a device, and the condition under which it accepts the value, if there is one."""
    if on_device.accepted:
        tight = _is_tight(argument, value, platform)
        return on_device, Verdict(POOL_TOO_SMALL, POOL_TOO_SMALL_REASON) if tight else Verdict()
    needed = condition(argument.name, value, on_device, models, (platform.manifest, platform.device))
    if not needed:
        return on_device, Verdict()
    return Verdict(), Verdict(on_device.code, f"accepted {needed}; by default, {on_device.reason}")


def _is_tight(argument: Argument, value: Any, platform: PlatformVariant) -> bool:
    if argument.name not in MEMORY_ARGUMENTS:
        return False
    return not pool_verdict(argument.name, value, small_model(), platform.manifest, platform.device).accepted


def _values_to_try(argument: Argument, platform: PlatformVariant) -> tuple[Any, ...]:
    """The values to try: those of the argument's declaration, those that the platform declares, and its default."""
    default = platform.base.values.get(argument.name)
    more = [*_declared_values(argument, platform), *([] if argument.arg.planned or default is None else [default])]
    more += platform.tested.get(argument.name, ())
    return values_of(argument, _backends(argument, platform), more)


def _declared_values(argument: Argument, platform: PlatformVariant) -> list[Any]:
    """The values that the platform's `Support` declarations name."""
    declarations = platform.support.get(argument.name, ())
    parts = [part for declaration in declarations for part in (*declaration.values, *declaration.only)]
    return [(part,) if argument.kind.many else part for part in parts]


def _backends(argument: Argument, platform: PlatformVariant) -> tuple[str, ...]:
    """The names of backends, or of implementations of an op, among which the argument chooses."""
    facts, family = platform.manifest.facts, argument.arg.family
    if family:
        return tuple(spec.name for spec in facts.backends.get(family, ()))
    ops = (op for op, name in NAMED_BY.items() if name == argument.name)
    return tuple(name for op in ops for name in argument_names(facts.ops, op))


def _records(argument: Argument, platform: PlatformVariant, tried: Sequence[TriedValue]) -> Iterator[Record]:
    yield _argument_record(argument, platform, tried)
    closed = is_closed(argument, _backends(argument, platform))
    if argument.kind.base in (int, float) and not argument.arg.planned:
        closed = True  # each boundary that was tried has its own cell
    declared = _declared_values(argument, platform)
    for value in tried:
        if (closed or value.value in declared) and not argument.arg.secret:
            yield _value_record(argument, platform, value)


def _argument_record(argument: Argument, platform: PlatformVariant, tried: Sequence[TriedValue]) -> Record:
    support = support_of_argument(platform.support.get(argument.name, ()))
    if argument.arg.planned:
        core = Status.PLANNED
        declared, code, reason = _declared_only(argument, platform, support)
        if lower(declared, core) is Status.PLANNED:
            code, reason = PLANNED, argument.arg.planned
    else:
        core = Status.SUPPORTED
        declared, code, reason = _summary(argument, tried)
        if support is not None and declared is Status.SUPPORTED:
            declared, reason = Status(support.status), support.reason
        later = [argument.show(value.value) for value in tried if value.core.code == PLANNED]
        if later:
            core = Status.LIMITED
            code = code or PLANNED
            reason = f"{reason}. Not yet: {', '.join(later)}" if reason else f"not yet: {', '.join(later)}"
    return _record(argument, platform, "arg", argument.name, (declared, core), (code, reason), support)


def _declared_only(
    argument: Argument, platform: PlatformVariant, support: SupportStatus | None
) -> tuple[Status, str, str]:
    """What a platform declares about a planned argument or value, for which it cannot be tried."""
    if support is not None:
        status = Status(support.status)
        return status, "" if status is Status.SUPPORTED else status.value, support.reason
    needs = argument.arg.needs
    if needs and needs not in platform.capabilities:
        return (
            Status.UNSUPPORTED,
            "capability_missing",
            f"platform {platform.name} does not have the capability {needs} on this device",
        )
    return Status.UNKNOWN, "", ""


def _summary(argument: Argument, tried: Sequence[TriedValue]) -> tuple[Status, str, str]:
    """The status of an argument by its values other than the default, as far as core accepts them."""
    others = [value for value in tried if value.value != argument.default and value.core.accepted]
    if not others:
        return _judged_by_core_only(argument, tried)
    refused = [other for other in others if not other.on_device.accepted]
    if not refused:
        return _conditions(argument, [value for value in tried if not value.limit.accepted])
    refused = [
        value for value in tried if value.core.accepted and not value.on_device.accepted
    ]  # includes the declared default
    first = refused[0]
    groups = _by_reason(argument, refused)
    reason = "not " + ". Not ".join(f"{_shown(argument, group)}: {group[0].on_device.reason}" for group in groups)
    if any(other.on_device.accepted for other in others):
        return Status.LIMITED, first.on_device.code, reason
    absent = all(value.on_device.code in _ABSENT for value in refused)
    return (Status.UNSUPPORTED if absent else Status.LIMITED), first.on_device.code, reason


def _conditions(argument: Argument, limited: Sequence[TriedValue]) -> tuple[Status, str, str]:
    """The status of an argument whose values are all accepted, these of them under a condition."""
    if not limited:
        return Status.SUPPORTED, "", ""
    first = limited[0].limit
    same = [value for value in limited if value.limit == first]
    return Status.LIMITED, first.code, f"{_shown(argument, same)}: {first.reason}"


def _by_reason(argument: Argument, refused: Sequence[TriedValue]) -> Iterable[list[TriedValue]]:
    """Refused values, grouped by their reason; reasons that differ only in the value itself count as one."""
    by_reason: dict[tuple[str, str], list[TriedValue]] = {}
    for value in refused:
        bare = re.sub(rf"(?<!\w){re.escape(argument.show(value.value))}(?!\w)", "", value.on_device.reason)
        by_reason.setdefault((value.on_device.code, bare), []).append(value)
    return by_reason.values()


def _shown(argument: Argument, tried: Sequence[TriedValue]) -> str:
    return ", ".join(argument.show(value.value) for value in tried)


def _judged_by_core_only(argument: Argument, tried: Sequence[TriedValue]) -> tuple[Status, str, str]:
    """Core refused every value (for example, because another argument must be set too); no platform was involved."""
    for value in tried:
        if value.value != argument.default and value.core.code != PLANNED:
            return Status.LIMITED, value.core.code, f"not {argument.show(value.value)} alone: {value.core.reason}"
    return Status.SUPPORTED, "", ""


def _value_record(argument: Argument, platform: PlatformVariant, tried: TriedValue) -> Record:
    support = support_of_value(argument, tried.value, platform.support.get(argument.name, ()))
    is_default = bool(tried.value == argument.default)
    if tried.core.code == PLANNED and not is_default:
        core = Status.PLANNED
        declared, code, reason = _declared_only(argument, platform, support)
        if lower(declared, core) is Status.PLANNED:
            code, reason = tried.core.code, tried.core.reason
    else:
        core = Status.SUPPORTED if tried.core.accepted else Status.UNSUPPORTED
        code, reason = tried.on_device.code, tried.on_device.reason
        refused = not tried.on_device.accepted and tried.core.accepted
        declared = Status.UNSUPPORTED if refused else Status(support.status) if support else Status.SUPPORTED
        reason = reason or (support.reason if support else "")
        if not tried.limit.accepted and declared is Status.SUPPORTED:
            declared, code, reason = Status.LIMITED, tried.limit.code, tried.limit.reason
    feature = f"{argument.name}={argument.show(tried.value)}"
    record = _record(argument, platform, "value", feature, (declared, core), (code, reason), support)
    return replace(record, default=is_default)


def _record(
    argument: Argument,
    platform: PlatformVariant,
    kind: Any,
    feature: str,
    statuses: tuple[Status, Status],
    code_and_reason: tuple[str, str],
    support: SupportStatus | None,
) -> Record:
    declared, core = statuses
    undeclared = declared is Status.UNKNOWN
    return Record(
        feature,
        kind,
        platform.name,
        platform.variant,
        declared,
        core,
        reason_code=code_and_reason[0],
        reason=code_and_reason[1],
        requires=argument.arg.needs or "",
        since=support.since if support else "",
        declared_by="" if undeclared else f"platform {platform.name}",
        base=None if undeclared else Level.E1,
    )


def _with_published(records: Iterable[Record], tables: Sequence[Table]) -> Iterator[Record]:
    """Give level E0 to cells that only the vendor's page covers."""
    published = {
        (argument.name, table.platform, variant)
        for table in tables
        for row in table.rows
        if (argument := table.argument(row)) is not None
        for variant in row.supported
    }
    for record in records:
        only_published = record.base is None and record.key in published
        yield replace(record, base=Level.E0) if only_published else record


def with_evidence(records: Iterable[Record], evidence: Sequence[Evidence]) -> list[Record]:
    """Attach to each record the evidence that names its cell."""
    by_cell: dict[Key, list[Evidence]] = defaultdict(list)
    for line in evidence:
        for feature in line.covers:
            by_cell[feature, line.platform, line.variant].append(line)
    return [replace(record, evidence=tuple(by_cell.get(record.key, ()))) for record in records]


def _with_values(records: Sequence[Record]) -> Iterator[Record]:
    """The level of an implemented argument follows from its values; a planned one has only its default as a value."""
    values: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        if record.kind == "value":
            values[record.argument, record.platform, record.variant].append(record)
    for record in records:
        has_values = record.kind == "arg" and record.core is not Status.PLANNED
        yield replace(record, values=tuple(values[record.key])) if has_values and values[record.key] else record
