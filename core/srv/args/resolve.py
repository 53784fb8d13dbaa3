"""Resolution: the user's statements and the facts in, a frozen configuration with a story a field out.

Pure: it reads no file, no environment, no device, and changes nothing that it is given.

    user statements ─ check ─┐
    backend specs ── choose ─┤
    platform defaults ───────┼─ by what they read ─> highest layer wins ─> constraints ─> Config + stories
    model, generic defaults ─┘                        (all refusals are collected on the way)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any

from srv.args.backends import Choice, choose_backends
from srv.args.config import ARGUMENTS, make_config
from srv.args.defaults import (
    CONSTRAINTS,
    CONTRIBUTIONS,
    DEVICE_CONSTRAINTS,
    DEVICE_DEFAULTS,
    GENERIC_DEFAULTS,
    MODEL_DEFAULTS,
    QUANTITIES,
)
from srv.args.seen import Facts, View, ask
from srv.args.spec import Argument
from srv.args.statement import BackendChoice, Layer, Part, Quantity, Resolved, Statement, Story, UserInput
from srv.args.support import REFUSED, by_argument, on_variant, refusing, said_of_value
from srv.args.wording import names_used, reworded
from srv.errors import PluginError, Refusal, Rejected
from srv.models.facts import ModelFacts
from srv.platform.facts import FAMILIES, BackendSpec, Constraint, Contribution, Default, DeviceFacts, Support
from srv.platform.manifest import Manifest

GENERIC_REASON = "generic default"


@dataclass(frozen=True, slots=True)
class OwnedDefault:
    """A default with the layer it speaks in and who speaks.

    `yields`: it is core's word on the device, and is not said where the platform declares its value unsupported.
    """

    default: Default
    layer: Layer
    owner: str
    yields: bool = False


@dataclass
class _Work:
    """What resolution knows so far.

    `support` is what the platform declares of arguments on this device.
    `values` holds decided arguments and quantities by name, `derived` what a value was computed from that no user set.
    """

    facts: Facts
    support: Mapping[str, tuple[Support, ...]] = field(default_factory=dict)
    said: dict[str, list[Statement]] = field(default_factory=lambda: {name: [] for name in ARGUMENTS})
    values: dict[str, Any] = field(default_factory=dict)
    stories: dict[str, Story] = field(default_factory=dict)
    derived: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    rejections: list[Rejected] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def reject(self, argument: str, code: str, value: Any, who: str, reason: str, remedy: str) -> None:
        shown = ARGUMENTS[argument].show(value)
        self.rejections.append(Rejected(code, argument, shown, who, reason, remedy))
        self.refused.add(argument)


def resolve(
    user: UserInput,
    *,
    manifest: Manifest | None = None,
    device: DeviceFacts | None = None,
    model: ModelFacts | None = None,
    backends: Mapping[str, Sequence[BackendSpec]] = MappingProxyType({}),
    chosen_because: str = "it is the platform asked about",
) -> Resolved:
    """Resolve all arguments, or raise `Refusal` with everything that stands against it.

    `manifest` and `device` come together, or neither does (then nothing of a platform is said).
    `backends` are third parties' specs by family. `chosen_because` completes "device = NAME because ...".
    PluginError: a statement of a plugin is wrong in itself, whatever the user said.
    """
    if (manifest is None) != (device is None):
        raise ValueError("a platform's manifest and the facts of its device come together")
    capabilities: frozenset[str] = frozenset()
    if manifest and device:
        capabilities = ask(f"platform {manifest.name}", "facts.capabilities", manifest.facts.capabilities, device)
    work = _Work(Facts(device, model, capabilities), _support(manifest, device), rejections=list(user.rejections))
    work.refused.update(name for rejected in user.rejections if (name := rejected.what) in ARGUMENTS)
    _take_user(work, user, manifest)
    choice = _choose_backends(work, manifest, backends)
    defaults = _owned_defaults(manifest, chosen_because if user.value("device") is None else None)
    _decide(work, defaults, _owned_contributions(manifest))
    _check_constraints(work, manifest)
    if work.rejections:
        used = names_used(user.statements)
        raise Refusal(list(dict.fromkeys(reworded(each, used) for each in work.rejections)))
    return Resolved(
        make_config({name: work.values[name] for name in ARGUMENTS}),
        MappingProxyType(work.stories),
        MappingProxyType(dict(choice)),
        MappingProxyType(work.quantities),
        capabilities,
        manifest.name if manifest else None,
        device,
    )


def _support(manifest: Manifest | None, device: DeviceFacts | None) -> dict[str, tuple[Support, ...]]:
    declared = by_argument(manifest.facts.support) if manifest else {}
    return {name: on_variant(device.variant, said) for name, said in declared.items()} if device else {}


def _take_user(work: _Work, user: UserInput, manifest: Manifest | None) -> None:
    """Enter what the user said; refuse what no layer could make right."""
    for given in user.statements:
        argument = ARGUMENTS[given.argument]
        against = argument.against(given.value)
        if against:
            remedy = f"See `srv args explain {argument.name}`."
            work.reject(argument.name, "bad_value", given.value, given.source, f"it {against}", remedy)
            continue
        if planned := argument.why_planned(given.value):
            remedy = _untouched(argument) if argument.arg.planned else _others(argument)
            work.reject(argument.name, "planned", given.value, given.source, planned, remedy)
            continue
        needs = argument.arg.needs
        if manifest and needs and needs not in work.facts.capabilities and given.value != argument.default:
            reason = f"platform {manifest.name} lacks the capability {needs} here"
            work.reject(
                argument.name, "capability_missing", given.value, given.source, reason, f"Leave {argument.flag} out."
            )
            continue
        reason = f"set by {given.source}"
        work.said[argument.name].append(
            Statement(argument.name, given.value, Layer.USER, given.source, reason, given.origin)
        )


def _untouched(argument: Argument) -> str:
    """A remedy: what the argument is if nobody sets it."""
    return "Leave it out." if argument.default is None else f"Leave it at {argument.show(argument.default)}."


def _others(argument: Argument) -> str:
    """A remedy: the choices of an argument that are there."""
    planned = {value for value, _ in argument.arg.planned_values}
    return f"Choose {', '.join(value for value in argument.choices if value not in planned)}."


def _user_winners(work: _Work) -> dict[str, Statement]:
    """The user's winning statement by argument, without those that ask for an automatic choice."""
    winners = {name: max(said, key=lambda each: each.origin) for name, said in work.said.items() if said}
    return {name: said for name, said in winners.items() if not ARGUMENTS[name].asks_for_automatic(said.value)}


def _choose_backends(
    work: _Work, manifest: Manifest | None, extra: Mapping[str, Sequence[BackendSpec]]
) -> Mapping[str, BackendChoice]:
    if manifest is None:
        return {}
    offered = {family: (*manifest.facts.backends.get(family, ()), *extra.get(family, ())) for family in FAMILIES}
    choice: Choice = choose_backends(manifest.name, offered, work.facts, _user_winners(work))
    for said in choice.statements:
        work.said[said.argument].append(said)
    work.rejections.extend(choice.rejections)
    work.refused.update(name for rejected in choice.rejections if (name := rejected.what) in ARGUMENTS)
    return choice.backends


def _owned_defaults(manifest: Manifest | None, chosen_because: str | None) -> list[OwnedDefault]:
    owned = [OwnedDefault(each, Layer.MODEL, "model") for each in MODEL_DEFAULTS]
    owned += [OwnedDefault(each, Layer.GENERIC, "srv") for each in GENERIC_DEFAULTS]
    if manifest is not None:
        name = manifest.name
        owned += [OwnedDefault(each, Layer.GENERIC, "srv", yields=True) for each in DEVICE_DEFAULTS]
        owned += [OwnedDefault(each, Layer.PLATFORM, f"platform {name}") for each in manifest.facts.defaults]
        if chosen_because is not None:
            owned.append(OwnedDefault(Default("device", lambda _: name, chosen_because), Layer.GENERIC, "srv"))
    return owned


def _owned_contributions(manifest: Manifest | None) -> list[tuple[str, Contribution]]:
    if manifest is None:
        return []
    theirs = [(f"platform {manifest.name}", each) for each in manifest.facts.contributions]
    ours = {(each.quantity, each.name): each for each in CONTRIBUTIONS}
    known = frozenset(ours)
    for owner, each in theirs:
        for name in each.instead_of:
            if (each.quantity, name) not in known:
                member, reason = f"contribution {each.name} to {each.quantity}", f"srv has no part {name} in it"
                raise PluginError(owner, member, reason, "Its `instead_of` must name parts of srv.")
            ours.pop((each.quantity, name), None)
    return [("srv", each) for each in ours.values()] + theirs


def _decide(work: _Work, defaults: Sequence[OwnedDefault], contributions: Sequence[tuple[str, Contribution]]) -> None:
    """Decide every argument and quantity, each after what its statements read."""
    by_argument: dict[str, list[OwnedDefault]] = {}
    for each in defaults:
        by_argument.setdefault(each.default.argument, []).append(each)
    for name in _order(defaults, contributions):
        if name in QUANTITIES:
            work.quantities[name] = _sum(work, name, [each for each in contributions if each[1].quantity == name])
            work.values[name] = work.quantities[name].total
        else:
            _decide_argument(work, name, by_argument.get(name, ()))


def _order(defaults: Sequence[OwnedDefault], contributions: Sequence[tuple[str, Contribution]]) -> list[str]:
    """Names of all arguments and quantities, none before one that it reads; PluginError names a cycle's members."""
    graph: dict[str, set[str]] = {name: set() for name in (*ARGUMENTS, *(QUANTITIES if contributions else ()))}
    owners: dict[str, str] = {}
    statements = [(each.owner, "default of", each.default.argument, each.default.reads) for each in defaults]
    statements += [(owner, f"contribution {each.name} to", each.quantity, each.reads) for owner, each in contributions]
    for owner, kind, name, reads in statements:
        for unknown in {name, *reads} - graph.keys():
            remedy = "It must name arguments and quantities of srv."
            raise PluginError(owner, f"{kind} {name}", f"{unknown} is no argument and no quantity", remedy)
        graph[name].update(reads)
        owners[name] = owner
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        members = list(reversed(error.args[1]))
        who = ", ".join(sorted({owners[name] for name in members if name in owners}))
        reason = " reads ".join(members)
        raise PluginError(who, "defaults", f"they go in a circle: {reason}", "One of them must not read.") from error


def _sum(work: _Work, name: str, contributions: Sequence[tuple[str, Contribution]]) -> Quantity:
    """The parts of a quantity: amounts first, then shares of what those before leave of the device's memory."""
    parts: list[Part] = []
    for owner, each in sorted(contributions, key=lambda owned: owned[1].of_rest):
        amount = _amount(work, owner, each)
        if each.of_rest:
            device = work.facts.device
            rest = (device.memory_bytes if device else 0) - sum(part.amount for part in parts)
            amount *= max(0, rest)
        parts.append(Part(each.name, owner, amount, each.reason))
    return Quantity(name, QUANTITIES[name], tuple(parts))


def _amount(work: _Work, owner: str, each: Contribution) -> float:
    member = f"contribution {each.name} to {each.quantity}"
    view = View(owner, member, work.facts, each.reads, work.values)
    amount: object = ask(owner, member, each.compute, view)
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise PluginError(owner, member, f"it gave {type(amount).__name__}", "It must give a number.")
    if each.of_rest and not 0 <= amount <= 1:
        raise PluginError(owner, member, f"it gave {amount}", "A share must lie between 0 and 1.")
    return amount


def _decide_argument(work: _Work, name: str, defaults: Sequence[OwnedDefault]) -> None:
    argument, said = ARGUMENTS[name], work.said[name]
    for owned in defaults:
        member = f"default of {name}"
        view = View(owned.owner, member, work.facts, owned.default.reads, work.values)
        value = ask(owned.owner, member, owned.default.compute, view)
        if value is not None and not (owned.yields and _unsupported(work, name, value)):
            value, reason = _valid(value, name, owned), owned.default.reason
            said.append(Statement(name, value, owned.layer, owned.owner, reason, reads=owned.default.reads))
    if not any(each.layer is Layer.GENERIC for each in said):
        said.append(Statement(name, argument.default, Layer.GENERIC, "srv", GENERIC_REASON))
    ranked = sorted(said, key=lambda each: (each.layer, each.origin), reverse=True)
    winner = _winner(argument, ranked)
    _refuse_disagreement(work, winner, said)
    shadowed = tuple(each for each in ranked if each is not winner and each.value is not None)
    work.values[name] = winner.value
    work.derived[name] = winner.reads
    work.stories[name] = Story(name, winner.value, winner.owner, winner.layer, winner.reason, shadowed)


def _unsupported(work: _Work, name: str, value: Any) -> bool:
    said = said_of_value(ARGUMENTS[name], value, work.support.get(name, ()))
    return said is not None and said.status in REFUSED


def _winner(argument: Argument, ranked: Sequence[Statement]) -> Statement:
    """The strongest statement that names a value. "auto" names none; from a user it also cancels his weaker words."""
    for position, said in enumerate(ranked):
        if not argument.asks_for_automatic(said.value):
            return said
        if said.layer is Layer.USER:
            below = [each for each in ranked[position:] if each.layer < Layer.USER]
            return next((each for each in below if not argument.asks_for_automatic(each.value)), said)
    return ranked[0]


def _valid(value: Any, name: str, owned: OwnedDefault) -> Any:
    argument = ARGUMENTS[name]
    try:
        value = argument.kind.read(argument.kind.dump(value))
        against = argument.against(value)
    except ValueError as error:
        against = str(error)
    if against:
        member, remedy = f"default of {name}", "Report this to its authors."
        raise PluginError(owned.owner, member, f"its value {value!r} {against}", remedy)
    return value


def _refuse_disagreement(work: _Work, winner: Statement, said: Sequence[Statement]) -> None:
    """Two statements of the winning layer (but the user's, who has an order) must not differ."""
    peers = [each for each in said if each.layer is winner.layer and each.value != winner.value]
    if not peers or winner.layer is Layer.USER:
        return
    argument = ARGUMENTS[winner.argument]
    told = f"{peers[0].owner} says {argument.show(peers[0].value)} because {peers[0].reason}"
    reason = f"{told}, but {winner.owner} says {argument.show(winner.value)} because {winner.reason}"
    who = f"{winner.owner} and {peers[0].owner}"
    work.reject(winner.argument, "defaults_disagree", winner.value, who, reason, f"Decide with {argument.flag}.")


def _check_constraints(work: _Work, manifest: Manifest | None) -> None:
    owned: list[tuple[str, Constraint]] = [("srv", each) for each in CONSTRAINTS]
    if manifest is not None:
        owned += [("srv", each) for each in DEVICE_CONSTRAINTS]
        declared = refusing(manifest.facts.support)  # of what others ask for: its own choices a platform knows
        declared = tuple(each for each in declared if work.stories[each.argument].layer is not Layer.PLATFORM)
        theirs = (*manifest.facts.constraints, *declared)
        owned += [(f"platform {manifest.name}", each) for each in theirs]
    found = [rejected for owner, each in owned if (rejected := _judge(work, owner, each)) is not None]
    faulty = work.refused | {rejected.what for rejected in found}
    # What was computed from a value that will not stand would only repeat the refusal of that one.
    work.rejections += [rejected for rejected in found if not faulty.intersection(work.derived[rejected.what])]


def _judge(work: _Work, owner: str, constraint: Constraint) -> Rejected | None:
    """The refusal of what breaks a constraint; None too if one of the values it reads is refused already."""
    reads = {constraint.argument, *constraint.reads}
    member = f"constraint {constraint.code} on {constraint.argument}"
    unknown = next((name for name in reads if name not in ARGUMENTS and name not in QUANTITIES), None)
    if unknown is None and constraint.argument not in ARGUMENTS:
        unknown = constraint.argument
    if unknown is not None:
        raise PluginError(owner, member, f"{unknown} is no argument", "It must name arguments of srv.")
    if reads & work.refused:
        return None
    reason = ask(owner, member, constraint.check, View(owner, member, work.facts, reads, work.values))
    if reason is None:
        return None
    if not reason.strip():
        raise PluginError(owner, member, "it refuses a value without a reason", "It must say why not, or give None.")
    story = work.stories[constraint.argument]
    shown = ARGUMENTS[constraint.argument].show(story.value)
    clause = reason if owner == "srv" else f"{reason} ({owner} says so)"
    required = [work.stories[name] for name in constraint.reads if name in work.stories]
    for each in required:  # nobody said these: without their reason the remedy would puzzle
        if each.layer is Layer.BACKEND:
            clause += f"; {each.argument} is {ARGUMENTS[each.argument].show(each.value)} because {each.reason}"
    return Rejected(constraint.code, constraint.argument, shown, story.owner, clause, constraint.remedy)
