"""Resolution: turn the user's statements and the facts into a frozen configuration, with the provenance of each value.

Pure: it reads no file, no environment variable and no device, and does not modify its inputs.

    user statements ─ check ─┐
    backend specs ── select ─┤
    platform defaults ───────┼─ in order of reads ─> highest layer wins ─> constraints ─> Config + provenance
    model, generic defaults ─┘                       (all rejections are collected on the way)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any

from srv.args.backends import BackendSelection, choose_backends
from srv.args.config import ARGUMENTS, make_config, plugin_arguments
from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.defaults import (
    CONSTRAINTS,
    CONTRIBUTIONS,
    DEVICE_CONSTRAINTS,
    DEVICE_DEFAULTS,
    GENERIC_DEFAULTS,
    MODEL_DEFAULTS,
    QUANTITIES,
)
from srv.args.extra_values import GENERIC_REASON, resolve_extras
from srv.args.prerequisites import USER_CONSTRAINTS
from srv.args.spec import Argument
from srv.args.statement import BackendChoice, Layer, Part, Provenance, Quantity, Resolved, Statement, UserInput
from srv.args.support import REFUSED, by_argument, constraints_from_support, on_variant, support_of_value
from srv.args.wording import names_used, reworded
from srv.errors import PluginError, Refusal, Rejection
from srv.platform.facts import FAMILIES, BackendSpec, Constraint, Contribution, Default, DeviceFacts, Support
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts


@dataclass(frozen=True, slots=True)
class OwnedDefault:
    """A default with its layer and its owner.

    `skip_if_unsupported`: a default of core that is ignored if the platform declares its value unsupported.
    """

    default: Default
    layer: Layer
    owner: str
    skip_if_unsupported: bool = False


@dataclass
class _State:
    """The state of a resolution in progress.

    `support`: the platform's declarations for this device, by argument. `statements`: by argument. `values`: resolved
    arguments and quantities by name. `derived_from`: the names from which a resolved value was computed.
    `refused`: arguments that have a rejection.
    """

    facts: Facts
    support: Mapping[str, tuple[Support, ...]] = field(default_factory=dict)
    statements: dict[str, list[Statement]] = field(default_factory=lambda: {name: [] for name in ARGUMENTS})
    values: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)
    derived_from: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def reject(self, argument: str, code: str, value: Any, source: str, reason: str, remedy: str) -> None:
        shown = ARGUMENTS[argument].show(value)
        self.rejections.append(Rejection(code, argument, shown, source, reason, remedy))
        self.refused.add(argument)


def resolve(
    user: UserInput,
    *,
    manifest: Manifest | None = None,
    device: DeviceFacts | None = None,
    model: ModelFacts | None = None,
    backends: Mapping[str, Sequence[BackendSpec]] = MappingProxyType({}),
    chosen_because: str = "it is the requested platform",
) -> Resolved:
    """Resolve all arguments, or raise `Refusal` with all rejections.

    Pass `manifest` and `device` together, or neither (then no platform takes part). `backends`: third-party specs by
    family. `chosen_because` completes "device = NAME because ...". PluginError: a default, contribution, constraint
    or backend of a plugin is invalid, independently of the user's values.
    """
    if (manifest is None) != (device is None):
        raise ValueError("pass manifest and device together, or neither")
    capabilities: frozenset[str] = frozenset()
    if manifest and device:
        capabilities = call_plugin(
            f"platform {manifest.name}", "facts.capabilities", manifest.facts.capabilities, device
        )
    state = _State(Facts(device, model, capabilities), _support(manifest, device), rejections=list(user.rejections))
    extras = resolve_extras(user.statements, plugin_arguments())
    state.rejections += extras.rejections
    user = user._replace(statements=tuple(each for each in user.statements if each.argument in ARGUMENTS))
    state.refused.update(name for rejected in user.rejections if (name := rejected.what) in ARGUMENTS)
    _add_user_statements(state, user, manifest)
    choice = _choose_backends(state, manifest, backends)
    defaults = _owned_defaults(manifest, chosen_because if user.value("device") is None else None)
    _resolve_all(state, defaults, _owned_contributions(manifest))
    _check_constraints(state, manifest)
    if state.rejections:
        used = names_used(user.statements)
        raise Refusal(list(dict.fromkeys(reworded(each, used) for each in state.rejections)))
    return Resolved(
        make_config({name: state.values[name] for name in ARGUMENTS}, extras.values),
        MappingProxyType({**state.provenance, **extras.provenance}),
        MappingProxyType(dict(choice)),
        MappingProxyType(state.quantities),
        capabilities,
        manifest.name if manifest else None,
        device,
    )


def _support(manifest: Manifest | None, device: DeviceFacts | None) -> dict[str, tuple[Support, ...]]:
    declared = by_argument(manifest.facts.support) if manifest else {}
    return {name: on_variant(device.variant, each) for name, each in declared.items()} if device else {}


def _add_user_statements(state: _State, user: UserInput, manifest: Manifest | None) -> None:
    """Add the user's statements; reject invalid values, planned ones, and those that need a missing capability."""
    for given in user.statements:
        argument, value, source = ARGUMENTS[given.argument], given.value, given.source
        needs = argument.arg.needs
        if error := argument.validation_error(value):
            remedy = f"See `srv args explain {argument.name}`."
            state.reject(argument.name, "bad_value", value, source, f"it {error}", remedy)
        elif planned := argument.planned_reason(value):
            remedy = _keep_default(argument) if argument.arg.planned else _implemented_choices(argument)
            state.reject(argument.name, "planned", value, source, planned, remedy)
        elif manifest and needs and needs not in state.facts.capabilities and value != argument.default:
            reason = f"platform {manifest.name} does not have the capability {needs} on this device"
            state.reject(argument.name, "capability_missing", value, source, reason, f"Leave {argument.flag} out.")
        else:
            statement = Statement(argument.name, value, Layer.USER, source, f"set by {source}", given.origin)
            state.statements[argument.name].append(statement)


def _keep_default(argument: Argument) -> str:
    """A remedy: keep the default of the argument."""
    return "Leave it out." if argument.default is None else f"Leave it at {argument.show(argument.default)}."


def _implemented_choices(argument: Argument) -> str:
    """A remedy: the choices of the argument that are implemented."""
    planned = {value for value, _ in argument.arg.planned_values}
    return f"Choose {', '.join(value for value in argument.choices if value not in planned)}."


def _user_winners(state: _State) -> dict[str, Statement]:
    """The user's winning statement by argument, without those that ask for an automatic choice."""
    winners = {name: max(own, key=lambda each: each.origin) for name, own in state.statements.items() if own}
    return {name: each for name, each in winners.items() if not ARGUMENTS[name].asks_for_automatic(each.value)}


def _choose_backends(
    state: _State, manifest: Manifest | None, extra: Mapping[str, Sequence[BackendSpec]]
) -> Mapping[str, BackendChoice]:
    if manifest is None:
        return {}
    offered = {family: (*manifest.facts.backends.get(family, ()), *extra.get(family, ())) for family in FAMILIES}
    selection: BackendSelection = choose_backends(manifest.name, offered, state.facts, _user_winners(state))
    for statement in selection.statements:
        state.statements[statement.argument].append(statement)
    state.rejections.extend(selection.rejections)
    state.refused.update(name for rejected in selection.rejections if (name := rejected.what) in ARGUMENTS)
    return selection.backends


def _owned_defaults(manifest: Manifest | None, chosen_because: str | None) -> list[OwnedDefault]:
    owned = [OwnedDefault(each, Layer.MODEL, "model") for each in MODEL_DEFAULTS]
    owned += [OwnedDefault(each, Layer.GENERIC, "srv") for each in GENERIC_DEFAULTS]
    if manifest is not None:
        name = manifest.name
        owned += [OwnedDefault(each, Layer.GENERIC, "srv", skip_if_unsupported=True) for each in DEVICE_DEFAULTS]
        owned += [OwnedDefault(each, Layer.PLATFORM, f"platform {name}") for each in manifest.facts.defaults]
        if chosen_because is not None:
            owned.append(OwnedDefault(Default("device", lambda _: name, chosen_because), Layer.GENERIC, "srv"))
    return owned


def _owned_contributions(manifest: Manifest | None) -> list[tuple[str, Contribution]]:
    if manifest is None:
        return []
    from_platform = [(f"platform {manifest.name}", each) for each in manifest.facts.contributions]
    from_core = {(each.quantity, each.name): each for each in CONTRIBUTIONS}
    known = frozenset(from_core)
    for owner, each in from_platform:
        for name in each.replaces:
            if (each.quantity, name) not in known:
                member, reason = f"contribution {each.name} to {each.quantity}", f"srv has no part {name} of it"
                raise PluginError(owner, member, reason, "Its `replaces` must name parts of srv.")
            from_core.pop((each.quantity, name), None)
    return [("srv", each) for each in from_core.values()] + from_platform


def _resolve_all(
    state: _State, defaults: Sequence[OwnedDefault], contributions: Sequence[tuple[str, Contribution]]
) -> None:
    """Resolve every argument and quantity after those that its defaults or contributions read."""
    by_argument: dict[str, list[OwnedDefault]] = {}
    for each in defaults:
        by_argument.setdefault(each.default.argument, []).append(each)
    for name in _order(defaults, contributions):
        if name in QUANTITIES:
            state.quantities[name] = _sum_contributions(
                state, name, [each for each in contributions if each[1].quantity == name]
            )
            state.values[name] = state.quantities[name].total
        else:
            _resolve_argument(state, name, by_argument.get(name, ()))


def _order(defaults: Sequence[OwnedDefault], contributions: Sequence[tuple[str, Contribution]]) -> list[str]:
    """All arguments and quantities in topological order of their reads; PluginError names the members of a cycle."""
    graph: dict[str, set[str]] = {name: set() for name in (*ARGUMENTS, *(QUANTITIES if contributions else ()))}
    owners: dict[str, str] = {}
    readers = [(each.owner, "default of", each.default.argument, each.default.reads) for each in defaults]
    readers += [(owner, f"contribution {each.name} to", each.quantity, each.reads) for owner, each in contributions]
    for owner, kind, name, reads in readers:
        for unknown in {name, *reads} - graph.keys():
            remedy = "It must name arguments and quantities of srv."
            raise PluginError(owner, f"{kind} {name}", f"{unknown} is neither an argument nor a quantity", remedy)
        graph[name].update(reads)
        owners[name] = owner
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        members = list(reversed(error.args[1]))
        owner = ", ".join(sorted({owners[name] for name in members if name in owners}))
        reason = f"their reads form a cycle: {' reads '.join(members)}"
        raise PluginError(owner, "defaults", reason, "Remove one of these reads.") from error


def _sum_contributions(state: _State, name: str, contributions: Sequence[tuple[str, Contribution]]) -> Quantity:
    """Sum the parts of a quantity: first absolute amounts, then shares of the device memory that is still left."""
    parts: list[Part] = []
    for owner, each in sorted(contributions, key=lambda owned: owned[1].of_remaining):
        amount = _contribution_amount(state, owner, each)
        if each.of_remaining:
            device = state.facts.device
            remaining = (device.memory_bytes if device else 0) - sum(part.amount for part in parts)
            amount *= max(0, remaining)
        parts.append(Part(each.name, owner, amount, each.reason))
    return Quantity(name, QUANTITIES[name], tuple(parts))


def _contribution_amount(state: _State, owner: str, each: Contribution) -> float:
    member = f"contribution {each.name} to {each.quantity}"
    context = DeclaredReadsContext(owner, member, state.facts, each.reads, state.values)
    amount: object = call_plugin(owner, member, each.compute, context)
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise PluginError(owner, member, f"it returned {type(amount).__name__}", "It must return a number.")
    if each.of_remaining and not 0 <= amount <= 1:
        raise PluginError(owner, member, f"it returned {amount}", "A share must be between 0 and 1.")
    return amount


def _resolve_argument(state: _State, name: str, defaults: Sequence[OwnedDefault]) -> None:
    argument, statements = ARGUMENTS[name], state.statements[name]
    for owned in defaults:
        member = f"default of {name}"
        context = DeclaredReadsContext(owned.owner, member, state.facts, owned.default.reads, state.values)
        value = call_plugin(owned.owner, member, owned.default.compute, context)
        if value is not None and not (owned.skip_if_unsupported and _unsupported(state, name, value)):
            value, reason = _validated(value, name, owned), owned.default.reason
            statements.append(Statement(name, value, owned.layer, owned.owner, reason, reads=owned.default.reads))
    if not any(each.layer is Layer.GENERIC for each in statements):
        statements.append(Statement(name, argument.default, Layer.GENERIC, "srv", GENERIC_REASON))
    ranked = sorted(statements, key=lambda each: (each.layer, each.origin), reverse=True)
    winner = _winner(argument, ranked)
    _reject_disagreement(state, winner, statements)
    overridden = tuple(each for each in ranked if each is not winner and each.value is not None)
    state.values[name] = winner.value
    state.derived_from[name] = winner.reads
    state.provenance[name] = Provenance(name, winner.value, winner.owner, winner.layer, winner.reason, overridden)


def _unsupported(state: _State, name: str, value: Any) -> bool:
    status = support_of_value(ARGUMENTS[name], value, state.support.get(name, ()))
    return status is not None and status.status in REFUSED


def _winner(argument: Argument, ranked: Sequence[Statement]) -> Statement:
    """The strongest statement other than "auto". If the user set "auto", the user's weaker values do not count."""
    for position, statement in enumerate(ranked):
        if not argument.asks_for_automatic(statement.value):
            return statement
        if statement.layer is Layer.USER:
            below = [each for each in ranked[position:] if each.layer < Layer.USER]
            return next((each for each in below if not argument.asks_for_automatic(each.value)), statement)
    return ranked[0]


def _validated(value: Any, name: str, owned: OwnedDefault) -> Any:
    argument = ARGUMENTS[name]
    try:
        value = argument.kind.read(argument.kind.dump(value))
        error = argument.validation_error(value)
    except ValueError as raised:
        error = str(raised)
    if error:
        member, remedy = f"default of {name}", "Report this to its authors."
        raise PluginError(owned.owner, member, f"its value {value!r} {error}", remedy)
    return value


def _reject_disagreement(state: _State, winner: Statement, statements: Sequence[Statement]) -> None:
    """Reject different values in the winning layer; in the layer USER they are allowed, because origins are ranked."""
    peers = [each for each in statements if each.layer is winner.layer and each.value != winner.value]
    if not peers or winner.layer is Layer.USER:
        return
    argument, peer = ARGUMENTS[winner.argument], peers[0]
    reason = f"{peer.owner} sets {argument.show(peer.value)} because {peer.reason}"
    reason += f", but {winner.owner} sets {argument.show(winner.value)} because {winner.reason}"
    owners = f"{winner.owner} and {peer.owner}"
    state.reject(winner.argument, "defaults_disagree", winner.value, owners, reason, f"Set {argument.flag}.")


def _check_constraints(state: _State, manifest: Manifest | None) -> None:
    owned: list[tuple[str, Constraint]] = [("srv", each) for each in CONSTRAINTS]
    owned += [("srv", each) for each in USER_CONSTRAINTS if state.provenance[each.argument].layer is Layer.USER]
    if manifest is not None:
        owned += [("srv", each) for each in DEVICE_CONSTRAINTS]
        # These do not apply to the platform's own defaults: it supports what it chooses.
        declared = constraints_from_support(manifest.facts.support)
        declared = tuple(each for each in declared if state.provenance[each.argument].layer is not Layer.PLATFORM)
        owned += [(f"platform {manifest.name}", each) for each in (*manifest.facts.constraints, *declared)]
    violations = [rejected for owner, each in owned if (rejected := _violation(state, owner, each)) is not None]
    invalid = state.refused | {rejected.what for rejected in violations}
    # The rejection of a value that was computed from an invalid one would only repeat that one's rejection.
    state.rejections += [
        rejected for rejected in violations if not invalid.intersection(state.derived_from[rejected.what])
    ]


def _violation(state: _State, owner: str, constraint: Constraint) -> Rejection | None:
    """The rejection if a constraint is violated; None also if one of the values that it reads is rejected already."""
    reads = {constraint.argument, *constraint.reads}
    member = f"constraint {constraint.code} on {constraint.argument}"
    unknown = next((name for name in reads if name not in ARGUMENTS and name not in QUANTITIES), None)
    if unknown is None and constraint.argument not in ARGUMENTS:
        unknown = constraint.argument
    if unknown is not None:
        raise PluginError(owner, member, f"{unknown} is not an argument", "It must name arguments of srv.")
    if reads & state.refused:
        return None
    context = DeclaredReadsContext(owner, member, state.facts, reads, state.values)
    reason = call_plugin(owner, member, constraint.check, context)
    if reason is None:
        return None
    if not reason.strip():
        raise PluginError(owner, member, "its reason is empty", "It must return a reason, or None.")
    provenance = state.provenance[constraint.argument]
    shown = ARGUMENTS[constraint.argument].show(provenance.value)
    clause = reason if owner == "srv" else f"{reason} (constraint of {owner})"
    read = [state.provenance[name] for name in constraint.reads if name in state.provenance]
    for each in read:  # values that a backend requires: the user did not set them, so the message explains them
        if each.layer is Layer.BACKEND:
            clause += f"; {each.argument} is {ARGUMENTS[each.argument].show(each.value)} because {each.reason}"
    return Rejection(constraint.code, constraint.argument, shown, provenance.owner, clause, constraint.remedy)
