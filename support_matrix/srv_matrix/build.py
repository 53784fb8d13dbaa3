"""Making the records: for each argument, value, platform and variant, what is declared, what core does, what ran.

What a platform declares is asked of the functions that refuse at launch (`judge`); a planned argument, which core
refuses before any platform is asked, has what the platform's `Support` says of it. No page is written here.
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
from srv.args.support import Said, by_argument, on_variant, said_of_argument, said_of_value
from srv.models.facts import ModelFacts
from srv.platform.facts import DeviceFacts, Support
from srv.platform.manifest import Manifest
from srv_matrix.judge import POOL_TOO_SMALL, Baseline, Verdict, baseline, planned_verdicts, pool_verdict, verdict
from srv_matrix.published import Table
from srv_matrix.records import Evidence, Key, Level, Record, Status, lower
from srv_matrix.sample import small_model
from srv_matrix.sweep import is_closed, values_of

PLANNED = "planned"
OF_MEMORY = ("mem_fraction_static", "max_total_tokens")  # the arguments that say how much the pool may take
TIGHT = (
    "taken where weights and the smallest pool fit; with nothing else said they do not on this device, for a model of "
    "three billion parameters"
)
_ABSENT = frozenset({"capability_missing", "unsupported", "unknown_backend", "no_backend", "dtype_missing"})


@dataclass(frozen=True)
class Place:
    """One variant of a platform, and what it comes to by itself. `ran`: numbers that tests gave arguments there."""

    manifest: Manifest
    variant: str
    device: DeviceFacts
    capabilities: frozenset[str]
    support: Mapping[str, tuple[Support, ...]]
    base: Baseline
    ran: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(frozen=True, slots=True)
class Tried:
    """One value with what core says by itself, and what came of it at a place. `tight`: no model of ordinary size fits
    beside it there, though one does where nothing is said.
    """

    value: Any
    core: Verdict
    there: Verdict
    tight: bool = False


def build(
    manifests: Iterable[Manifest],
    models: Sequence[ModelFacts],
    evidence: Sequence[Evidence] = (),
    tables: Sequence[Table] = (),
) -> tuple[Record, ...]:
    """Every record of these platforms, in order of declaration, then platform, then variant.

    `models`: what values are judged with, the most ordinary first.
    """
    manifests = tuple(manifests)
    places = [place for manifest in manifests for place in _places(manifest, models[0], evidence)]
    planned = _ask_planned(places, models[0])
    records: list[Record] = []
    for argument in ARGUMENTS.values():
        core: dict[str, Verdict] = {}
        for place in places:
            tried = _try(argument, place, models, core, planned)
            records += _records(argument, place, tried)
    return tuple(_roll_up_all(with_evidence(_with_published(records, tables), evidence)))


def _places(manifest: Manifest, model: ModelFacts, evidence: Sequence[Evidence]) -> Iterator[Place]:
    for variant in manifest.variants:
        device = manifest.facts.profiles[variant]
        said = {name: on_variant(variant, each) for name, each in by_argument(manifest.facts.support).items()}
        capabilities = manifest.facts.capabilities(device)
        base = baseline(model, manifest, device)
        yield Place(manifest, variant, device, capabilities, said, base, _ran(evidence, manifest.name, variant))


def _ran(evidence: Sequence[Evidence], platform: str, variant: str) -> Mapping[str, tuple[Any, ...]]:
    """Numbers that evidence of a place names, beside those that are tried anyway: each is a cell of its own."""
    found: dict[str, list[Any]] = {}
    cells = (cell for each in evidence if (each.platform, each.variant) == (platform, variant) for cell in each.covers)
    for cell in dict.fromkeys(cells):
        name, named, text = cell.partition("=")
        argument = ARGUMENTS.get(name)
        if argument is not None and named and argument.kind.base in (int, float):
            with contextlib.suppress(ValueError):  # no value: then there is no such cell, and the evidence is refused
                found.setdefault(name, []).append(argument.parse(text))
    return {name: tuple(values) for name, values in found.items()}


def _ask_planned(places: Sequence[Place], model: ModelFacts) -> dict[tuple[str, str], Verdict]:
    planned = [argument for argument in ARGUMENTS.values() if argument.arg.planned]
    wanted = {
        argument.name: tuple(value for place in places for value in _named(argument, place)) for argument in planned
    }
    return planned_verdicts(wanted, model)


def _try(
    argument: Argument,
    place: Place,
    models: Sequence[ModelFacts],
    core: dict[str, Verdict],
    planned: Mapping[tuple[str, str], Verdict],
) -> list[Tried]:
    """Ask about every value. `core` keeps core's own verdicts by value, so that they are asked for once."""
    if argument.arg.planned:
        verdicts = [
            (value, planned.get((argument.name, argument.show(value)), Verdict())) for value in _named(argument, place)
        ]
        return [Tried(value, each, each) for value, each in verdicts]
    tried: list[Tried] = []
    for value in _named(argument, place):
        shown = argument.show(value)
        if shown not in core:
            core[shown] = verdict(argument.name, value, models, None)
        there = place.base.verdict
        if there.taken:
            there = verdict(argument.name, value, models, (place.manifest, place.device))
        tried.append(Tried(value, core[shown], there, there.taken and _is_tight(argument, value, place)))
    return tried


def _is_tight(argument: Argument, value: Any, place: Place) -> bool:
    if argument.name not in OF_MEMORY:
        return False
    return not pool_verdict(argument.name, value, small_model(), place.manifest, place.device).taken


def _named(argument: Argument, place: Place) -> tuple[Any, ...]:
    """The values to try there: the declaration's, those that the platform speaks of, and the one it would take."""
    own = place.base.values.get(argument.name)
    more = [*_spoken_of(argument, place), *([] if argument.arg.planned or own is None else [own])]
    more += place.ran.get(argument.name, ())
    return values_of(argument, _backends(argument, place), more)


def _spoken_of(argument: Argument, place: Place) -> list[Any]:
    named = [part for said in place.support.get(argument.name, ()) for part in (*said.values, *said.only)]
    return [(part,) if argument.kind.many else part for part in named]


def _backends(argument: Argument, place: Place) -> tuple[str, ...]:
    family = argument.arg.family
    return tuple(spec.name for spec in place.manifest.facts.backends.get(family, ())) if family else ()


def _records(argument: Argument, place: Place, tried: Sequence[Tried]) -> Iterator[Record]:
    yield _of_argument(argument, place, tried)
    closed = is_closed(argument, _backends(argument, place))
    if argument.kind.base in (int, float) and not argument.arg.planned:
        closed = True  # the boundaries that were tried are cells of their own
    named = _spoken_of(argument, place)
    for each in tried:
        if (closed or each.value in named) and not argument.arg.secret:
            yield _of_value(argument, place, each)


def _of_argument(argument: Argument, place: Place, tried: Sequence[Tried]) -> Record:
    said = said_of_argument(place.support.get(argument.name, ()))
    if argument.arg.planned:
        core = Status.PLANNED
        declared, code, reason = _silent(argument, place, said)
        if lower(declared, core) is Status.PLANNED:
            code, reason = PLANNED, argument.arg.planned
    else:
        core = Status.SUPPORTED
        declared, code, reason = _summary(argument, tried)
        if said is not None and declared is Status.SUPPORTED:
            declared, reason = Status(said.status), said.reason
        later = [argument.show(each.value) for each in tried if each.core.code == PLANNED]
        if later:
            core = Status.LIMITED
            code = code or PLANNED
            reason = f"{reason}. Not yet: {', '.join(later)}" if reason else f"not yet: {', '.join(later)}"
    return _record(argument, place, "arg", argument.name, (declared, core), (code, reason), said)


def _silent(argument: Argument, place: Place, said: Said | None) -> tuple[Status, str, str]:
    """What a platform says of what core would refuse before asking it."""
    if said is not None:
        status = Status(said.status)
        return status, "" if status is Status.SUPPORTED else status.value, said.reason
    needs = argument.arg.needs
    if needs and needs not in place.capabilities:
        return Status.UNSUPPORTED, "capability_missing", f"platform {place.name} lacks the capability {needs} here"
    return Status.UNKNOWN, "", ""


def _summary(argument: Argument, tried: Sequence[Tried]) -> tuple[Status, str, str]:
    """An argument by its values other than the default, those that core itself allows."""
    others = [each for each in tried if each.value != argument.default and each.core.taken]
    if not others:
        return _by_core_alone(argument, tried)
    refused = [each for each in others if not each.there.taken]
    if not refused:
        tight = ", ".join(argument.show(each.value) for each in tried if each.tight)
        return (Status.LIMITED, POOL_TOO_SMALL, f"{tight}: {TIGHT}") if tight else (Status.SUPPORTED, "", "")
    refused = [each for each in tried if each.core.taken and not each.there.taken]  # the declared default too
    first = refused[0]
    told = [f"{_names(argument, alike)}: {alike[0].there.reason}" for alike in _alike(argument, refused)]
    reason = "not " + ". Not ".join(told)
    if any(each.there.taken for each in others):
        return Status.LIMITED, first.there.code, reason
    absent = all(each.there.code in _ABSENT for each in refused)
    return (Status.UNSUPPORTED if absent else Status.LIMITED), first.there.code, reason


def _alike(argument: Argument, refused: Sequence[Tried]) -> Iterable[list[Tried]]:
    """Values that are refused for one reason, which may name each."""
    found: dict[tuple[str, str], list[Tried]] = {}
    for each in refused:
        bare = re.sub(rf"(?<!\w){re.escape(argument.show(each.value))}(?!\w)", "", each.there.reason)
        found.setdefault((each.there.code, bare), []).append(each)
    return found.values()


def _names(argument: Argument, tried: Sequence[Tried]) -> str:
    return ", ".join(argument.show(each.value) for each in tried)


def _by_core_alone(argument: Argument, tried: Sequence[Tried]) -> tuple[Status, str, str]:
    """Core refused whatever was tried (it wants another argument beside it, say): no platform was asked."""
    for each in tried:
        if each.value != argument.default and each.core.code != PLANNED:
            return Status.LIMITED, each.core.code, f"not {argument.show(each.value)} alone: {each.core.reason}"
    return Status.SUPPORTED, "", ""


def _of_value(argument: Argument, place: Place, tried: Tried) -> Record:
    said = said_of_value(argument, tried.value, place.support.get(argument.name, ()))
    is_default = bool(tried.value == argument.default)
    if tried.core.code == PLANNED and not is_default:
        core = Status.PLANNED
        declared, code, reason = _silent(argument, place, said)
        if lower(declared, core) is Status.PLANNED:
            code, reason = tried.core.code, tried.core.reason
    else:
        core = Status.SUPPORTED if tried.core.taken else Status.UNSUPPORTED
        code, reason = tried.there.code, tried.there.reason
        against = not tried.there.taken and tried.core.taken
        declared = Status.UNSUPPORTED if against else Status(said.status) if said else Status.SUPPORTED
        reason = reason or (said.reason if said else "")
        if tried.tight and declared is Status.SUPPORTED:
            declared, code, reason = Status.LIMITED, POOL_TOO_SMALL, TIGHT
    feature = f"{argument.name}={argument.show(tried.value)}"
    made = _record(argument, place, "value", feature, (declared, core), (code, reason), said)
    return replace(made, default=is_default)


def _record(
    argument: Argument,
    place: Place,
    kind: Any,
    feature: str,
    facts: tuple[Status, Status],
    why: tuple[str, str],
    said: Said | None,
) -> Record:
    declared, core = facts
    silent = declared is Status.UNKNOWN
    return Record(
        feature,
        kind,
        place.name,
        place.variant,
        declared,
        core,
        reason_code=why[0],
        reason=why[1],
        requires=argument.arg.needs or "",
        since=said.since if said else "",
        declared_by="" if silent else f"platform {place.name}",
        base=None if silent else Level.E1,
    )


def _with_published(records: Iterable[Record], tables: Sequence[Table]) -> Iterator[Record]:
    """A cell that nobody but the vendor's page speaks of is of level E0."""
    published = {
        (argument.name, table.platform, variant)
        for table in tables
        for row in table.rows
        if (argument := table.argument(row)) is not None
        for variant in row.says
    }
    for record in records:
        silent = record.base is None and record.key in published
        yield replace(record, base=Level.E0) if silent else record


def with_evidence(records: Iterable[Record], evidence: Sequence[Evidence]) -> list[Record]:
    """The records, each with the evidence that names its cell."""
    by_cell: dict[Key, list[Evidence]] = defaultdict(list)
    for each in evidence:
        for feature in each.covers:
            by_cell[feature, each.platform, each.variant].append(each)
    return [replace(record, evidence=tuple(by_cell.get(record.key, ()))) for record in records]


def _roll_up_all(records: Sequence[Record]) -> list[Record]:
    values: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        if record.kind == "value":
            values[record.argument, record.platform, record.variant].append(record)
    return [_rolled_up(each, values[each.key]) if each.kind == "arg" else each for each in records]


def _rolled_up(record: Record, values: Sequence[Record]) -> Record:
    """An argument that core has, with what its values come to; others have values in name only (the default)."""
    if not values or record.core is Status.PLANNED:
        return record
    return replace(record, rolled_up=roll_up(values), by_values=True)


def roll_up(values: Sequence[Record]) -> Level | None:
    """The level of an argument from its values: the lowest of all that work; None if one of them has none."""
    levels = [record.level for record in values if record.status.works]
    if not levels or any(level is None for level in levels):
        return None
    return min(level for level in levels if level is not None)
