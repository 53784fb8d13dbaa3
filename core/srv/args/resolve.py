"""Resolution: turn the user's statements and the facts into a frozen configuration, with the provenance of each value.

Pure: it reads no file, no environment variable and no device, and does not modify its inputs.

    user statements ─ check ─┐
    backend specs ── select ─┤
    platform defaults ───────┼─ in order of reads ─> highest layer wins ─> constraints ─> Config + provenance
    model, generic defaults ─┘                       (all rejections are collected on the way)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any

from srv.args.backend_arguments import overridden_arguments, unread_arguments
from srv.args.backend_groups import sparse_arguments
from srv.args.backends import BACKEND_SLOTS, BackendSelection, choose_backends
from srv.args.config import ARGUMENTS, make_config, plugin_arguments
from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.defaults import (
    CONSTRAINTS,
    DEVICE_CONSTRAINTS,
    QUANTITIES,
    USER_CONSTRAINTS,
)
from srv.args.extra_values import GENERIC_REASON, resolve_extras
from srv.args.named_ops import unknown_implementations
from srv.args.owned import OwnedDefault, owned_contributions, owned_defaults
from srv.args.quantities import sum_parts
from srv.args.rules import inert
from srv.args.spec import Argument
from srv.args.statement import BackendChoice, Layer, Provenance, Quantity, Resolved, Statement, UserInput, UserStatement
from srv.args.support import REFUSED, by_argument_on, constraints_from_support, support_of_value
from srv.args.wording import EXCLUDED, names_used, reworded, without_excluded
from srv.errors import PluginError, Refusal, Rejection
from srv.platform.experts import MOE_FAMILY, with_added
from srv.platform.facts import FAMILIES, BackendSpec, Constraint, Contribution, DeviceFacts, Support
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts

_GIVING_WAY = (Layer.MODEL, Layer.PLATFORM)  # the layers whose defaults give way to what the user set


@dataclass
class _State:
    """The state of a resolution in progress.

    `support`: the platform's declarations for this device, by argument. `statements`: by argument. `values`: resolved
    arguments and quantities by name. `derived_from`: the names from which a resolved value was computed.
    `refused`: arguments that have a rejection. `carried`: those of values that are resolved nevertheless.
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
    carried: list[Rejection] = field(default_factory=list)

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
    carry: bool = False,
) -> Resolved:
    """Resolve all arguments, or raise `Refusal` with all rejections.

    Pass `manifest` and `device` together, or neither (then no platform takes part). `backends`: third-party specs by
    family. `chosen_because` completes "device = NAME because ...". Planned values, and values that violate a
    constraint, are resolved like others; `carry`: their rejections are in `Resolved.refusals` instead of raised.
    PluginError: a default, contribution, constraint or backend of a plugin is invalid, whatever the user sets.
    """
    if (manifest is None) != (device is None):
        raise ValueError("pass manifest and device together, or neither")
    capabilities: frozenset[str] = frozenset()
    if manifest and device:
        owner = f"platform {manifest.name}"
        capabilities = call_plugin(owner, "facts.capabilities", manifest.facts.capabilities, device)
    extras = resolve_extras(user.statements, plugin_arguments())
    core_input = user._replace(
        statements=tuple(statement for statement in user.statements if statement.argument in ARGUMENTS)
    )
    defaults = owned_defaults(manifest, chosen_because if user.value("device") is None else None)
    state = _State(Facts(device, model, capabilities), _support(manifest, device), rejections=list(user.rejections))
    state.rejections += extras.rejections
    state.refused.update(name for rejected in user.rejections if (name := rejected.what) in ARGUMENTS)
    _add_user_statements(state, core_input, manifest)
    choice = _choose_backends(state, manifest, backends)
    _resolve_all(state, defaults, owned_contributions(manifest), _excluding(manifest, defaults))
    _check_constraints(state, manifest, state.rejections or state.carried)
    used = names_used(user.statements)
    carried = [reworded(rejection, used) for rejection in state.carried]
    if state.rejections or (state.carried and not carry):
        raise Refusal(list(dict.fromkeys([*carried, *(reworded(rejection, used) for rejection in state.rejections)])))
    return Resolved(
        make_config({name: state.values[name] for name in ARGUMENTS}, extras.values),
        MappingProxyType({**state.provenance, **extras.provenance}),
        MappingProxyType(dict(choice)),
        MappingProxyType(state.quantities),
        capabilities,
        manifest.name if manifest else None,
        device,
        tuple(dict.fromkeys(carried)),
    )


def _support(manifest: Manifest | None, device: DeviceFacts | None) -> Mapping[str, tuple[Support, ...]]:
    return by_argument_on(manifest.facts.support, device.variant) if manifest and device else {}


def _add_user_statements(state: _State, user: UserInput, manifest: Manifest | None) -> None:
    """Add the user's statements; reject invalid values, planned ones, and those that need a missing capability."""
    for statement in user.statements:
        argument, value, source = ARGUMENTS[statement.argument], statement.value, statement.source
        needs = argument.arg.needs
        if error := argument.validation_error(value):
            remedy = f"See `srv args explain {argument.name}`."
            state.reject(argument.name, "bad_value", value, source, f"it {error}", remedy)
        elif planned := argument.planned_reason(value):
            remedy = _keep_default(argument) if argument.arg.planned else _implemented_choices(argument)
            state.carried.append(Rejection("planned", argument.name, argument.show(value), source, planned, remedy))
            _state_value(state, statement)
        elif manifest and needs and needs not in state.facts.capabilities and value != argument.default:
            reason = f"platform {manifest.name} does not have the capability {needs} on this device"
            declared = support_of_value(argument, value, state.support.get(argument.name, ()))
            reason += f": {declared.reason}" if declared is not None and declared.reason else ""
            state.reject(argument.name, "capability_missing", value, source, reason, f"Leave {argument.flag} out.")
        else:
            _state_value(state, statement)


def _state_value(state: _State, user_statement: UserStatement) -> None:
    statement = Statement(
        user_statement.argument,
        user_statement.value,
        Layer.USER,
        user_statement.source,
        f"set by {user_statement.source}",
        user_statement.origin,
    )
    state.statements[user_statement.argument].append(statement)


def _keep_default(argument: Argument) -> str:
    """A remedy: keep the default of the argument."""
    return "Leave it out." if argument.default is None else f"Leave it at {argument.show(argument.default)}."


def _implemented_choices(argument: Argument) -> str:
    """A remedy: the choices of the argument that are implemented."""
    return f"Choose {', '.join(argument.implemented_choices)}."


def _user_winners(state: _State) -> dict[str, Statement]:
    """The user's winning statement by argument, without those that ask for an automatic choice."""
    winners = {
        name: max(statements, key=lambda statement: statement.origin)
        for name, statements in state.statements.items()
        if statements
    }
    return {name: winner for name, winner in winners.items() if not ARGUMENTS[name].asks_for_automatic(winner.value)}


def _choose_backends(
    state: _State, manifest: Manifest | None, extra: Mapping[str, Sequence[BackendSpec]]
) -> Mapping[str, BackendChoice]:
    if manifest is None:
        return {}
    offered = {family: (*manifest.facts.backends.get(family, ()), *extra.get(family, ())) for family in FAMILIES}
    user = _user_winners(state)
    ops = with_added(manifest.facts.ops, offered[MOE_FAMILY])
    selection: BackendSelection = choose_backends(manifest.name, offered, state.facts, user, ops=ops)
    for statement in selection.statements:
        state.statements[statement.argument].append(statement)
    # Where the platform declares a value unsupported, its own reason is given.
    supported = {name: winner for name, winner in user.items() if not _unsupported(state, name, winner.value)}
    if selection.carried:  # backends that would read an argument may be missing
        supported = {name: winner for name, winner in supported.items() if ARGUMENTS[name].arg.read_by is None}
    slots = ((*sparse_arguments(slot, state.facts.model), *names) for slot, (_, names) in BACKEND_SLOTS.items())
    overridden = overridden_arguments(user, slots)
    unknown = unknown_implementations(manifest.name, ops, supported)
    rejections = (*selection.rejections, *overridden, *unread_arguments(supported, selection.backends), *unknown)
    state.rejections.extend(rejections)
    state.refused.update(name for rejected in rejections if (name := rejected.what) in ARGUMENTS)
    state.carried += selection.carried
    return selection.backends


def _excluding(
    manifest: Manifest | None, defaults: Sequence[OwnedDefault]
) -> Mapping[str, list[tuple[str, Constraint]]]:
    """The constraints that exclude a value, with their owners, of each argument with a default that gives way."""
    owned = [("srv", constraint) for constraint in (*CONSTRAINTS, *(DEVICE_CONSTRAINTS if manifest else ()))]
    if manifest is not None:
        owned += [(f"platform {manifest.name}", constraint) for constraint in manifest.facts.constraints]
    arguments = {default.default.argument for default in defaults if default.layer in _GIVING_WAY}
    excluding: dict[str, list[tuple[str, Constraint]]] = {}
    for owner, constraint in owned:
        if constraint.code == EXCLUDED and constraint.argument in arguments:
            excluding.setdefault(constraint.argument, []).append((owner, constraint))
    return excluding


def _resolve_all(
    state: _State,
    defaults: Sequence[OwnedDefault],
    contributions: Sequence[tuple[str, Contribution]],
    excluding: Mapping[str, Sequence[tuple[str, Constraint]]],
) -> None:
    """Resolve every argument and quantity after those that its defaults, constraints or contributions read.

    excluding: constraints, by argument, to which its defaults of the model and the platform give way.
    """
    by_argument: dict[str, list[OwnedDefault]] = {}
    for default in defaults:
        by_argument.setdefault(default.default.argument, []).append(default)
    unstated = (
        _declared().keys() - by_argument.keys() - {name for name, statements in state.statements.items() if statements}
    )
    for name, provenance in _declared().items():
        if name in unstated:
            state.values[name], state.provenance[name] = provenance.value, provenance
    readers = [(default.owner, "default of", default.default.argument, default.default.reads) for default in defaults]
    readers += [
        (owner, f"contribution {contribution.name} to", contribution.quantity, contribution.reads)
        for owner, contribution in contributions
    ]
    for owner, constraint in (pair for owned in excluding.values() for pair in owned):
        others = tuple(read for read in constraint.reads if read != constraint.argument)
        readers.append((owner, f"constraint {constraint.code} on", constraint.argument, others))
    for name in _order(tuple(readers), bool(contributions)):
        if name in QUANTITIES:
            parts = [contribution for contribution in contributions if contribution[1].quantity == name]
            state.quantities[name] = Quantity(name, QUANTITIES[name], sum_parts(state.facts, state.values, parts))
            state.values[name] = state.quantities[name].total
        elif name not in unstated:
            _resolve_argument(state, name, by_argument.get(name, ()))
            if any(_gives_way(state, owner, rule) for owner, rule in excluding.get(name, ())):
                state.statements[name] = [
                    statement for statement in state.statements[name] if statement.layer not in _GIVING_WAY
                ]
                _settle(state, name)
            _reject_disagreement(state, name)


@functools.lru_cache(maxsize=64)  # the same for every launch on a platform; the support matrix asks thousands of times
def _order(readers: tuple[tuple[str, str, str, tuple[str, ...]], ...], quantities: bool) -> tuple[str, ...]:
    """All arguments and quantities in topological order of their reads; PluginError names the members of a cycle.

    readers: (owner, kind, name, reads) of each default and contribution.
    """
    graph: dict[str, set[str]] = {name: set() for name in (*ARGUMENTS, *(QUANTITIES if quantities else ()))}
    owners: dict[str, str] = {}
    for owner, kind, name, reads in readers:
        for unknown in {name, *reads} - graph.keys():
            remedy = "It must name arguments and quantities of srv."
            raise PluginError(owner, f"{kind} {name}", f"{unknown} is neither an argument nor a quantity", remedy)
        graph[name].update(reads)
        owners[name] = owner
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        members = list(reversed(error.args[1]))
        owner = ", ".join(sorted({owners[name] for name in members if name in owners}))
        reason = f"their reads form a cycle: {' reads '.join(members)}"
        raise PluginError(owner, "defaults", reason, "Remove one of these reads.") from error


def _resolve_argument(state: _State, name: str, defaults: Sequence[OwnedDefault]) -> None:
    argument, statements = ARGUMENTS[name], state.statements[name]
    for owned in defaults:
        member = f"default of {name}"
        context = DeclaredReadsContext(owned.owner, member, state.facts, owned.default.reads, state.values)
        value = call_plugin(owned.owner, member, owned.default.compute, context)
        if value is not None and not (owned.skip_if_unsupported and _unsupported(state, name, value)):
            value, reason = _validated(value, name, owned), owned.default.reason
            statements.append(Statement(name, value, owned.layer, owned.owner, reason, reads=owned.default.reads))
    if not any(statement.layer is Layer.GENERIC for statement in statements):
        statements.append(Statement(name, argument.default, Layer.GENERIC, "srv", GENERIC_REASON))
    _settle(state, name)


def _settle(state: _State, name: str) -> None:
    """The value of an argument, from all that is stated about it."""
    ranked = sorted(state.statements[name], key=lambda statement: (statement.layer, statement.origin), reverse=True)
    winner = _winner(ARGUMENTS[name], ranked)
    overridden = tuple(statement for statement in ranked if statement is not winner and statement.value is not None)
    state.values[name] = winner.value
    state.derived_from[name] = winner.reads
    state.provenance[name] = Provenance(name, winner.value, winner.owner, winner.layer, winner.reason, overridden)


@functools.cache
def _declared() -> Mapping[str, Provenance]:
    """The provenance of each argument about which nothing is stated: of its declared default."""
    return {
        name: Provenance(name, argument.default, "srv", Layer.GENERIC, GENERIC_REASON)
        for name, argument in ARGUMENTS.items()
    }


def _unsupported(state: _State, name: str, value: Any) -> bool:
    status = support_of_value(ARGUMENTS[name], value, state.support.get(name, ()))
    return status is not None and status.status in REFUSED


def _winner(argument: Argument, ranked: Sequence[Statement]) -> Statement:
    """The strongest statement other than "auto". If the user set "auto", the user's weaker values do not count."""
    for position, statement in enumerate(ranked):
        if not argument.asks_for_automatic(statement.value):
            return statement
        if statement.layer is Layer.USER:
            below = [lower for lower in ranked[position:] if lower.layer < Layer.USER]
            return next((lower for lower in below if not argument.asks_for_automatic(lower.value)), statement)
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


def _reject_disagreement(state: _State, name: str) -> None:
    """Reject different values in the winning layer; in the layer USER they are allowed, because origins are ranked."""
    argument, winner = ARGUMENTS[name], state.provenance[name]
    peers = [
        statement
        for statement in state.statements[name]
        if statement.layer is winner.layer and statement.value != winner.value
    ]
    if not peers or winner.layer is Layer.USER:
        return
    peer = peers[0]
    reason = f"{peer.owner} sets {argument.show(peer.value)} because {peer.reason}"
    reason += f", but {winner.owner} sets {argument.show(winner.value)} because {winner.reason}"
    owners = f"{winner.owner} and {peer.owner}"
    state.reject(winner.argument, "defaults_disagree", winner.value, owners, reason, f"Set {argument.flag}.")


def _check_constraints(state: _State, manifest: Manifest | None, rejections: list[Rejection]) -> None:
    """Add the rejections of values that violate a constraint."""
    owned: list[tuple[str, Constraint]] = [("srv", constraint) for constraint in CONSTRAINTS]
    owned += [
        ("srv", constraint)
        for constraint in USER_CONSTRAINTS
        if state.provenance[constraint.argument].layer is Layer.USER
    ]
    if manifest is not None:
        owned += [("srv", constraint) for constraint in DEVICE_CONSTRAINTS]
        # These do not apply to the platform's own defaults: it supports what it chooses.
        declared = constraints_from_support(manifest.facts.support)
        declared = tuple(
            constraint for constraint in declared if state.provenance[constraint.argument].layer is not Layer.PLATFORM
        )
        owned += [(f"platform {manifest.name}", constraint) for constraint in (*manifest.facts.constraints, *declared)]
    violations: list[Rejection] = []
    for owner, constraint in owned:
        if (rejected := _violation(state, owner, constraint)) is not None:
            violations.append(rejected)
    invalid = state.refused | {rejected.what for rejected in violations}
    # The rejection of a value that was computed from an invalid one would only repeat that one's rejection.
    remaining = [
        violation
        for violation in without_excluded(violations)
        if not invalid.intersection(state.derived_from.get(violation.what, ()))
    ]
    planned = {rejection.what for rejection in state.carried}  # that a launch would refuse them is said
    remaining = [violation for violation in remaining if violation.what not in planned]
    faulty = {violation.what for violation in remaining if violation.code != inert.CODE}  # another reason says more
    rejections += [violation for violation in remaining if violation.code != inert.CODE or violation.what not in faulty]


def _gives_way(state: _State, owner: str, excluding: Constraint) -> bool:
    """Whether a default of the model or the platform is excluded by something that the user set."""
    if state.provenance[excluding.argument].layer not in _GIVING_WAY:
        return False
    read = [state.provenance[name] for name in excluding.reads if name in state.provenance]
    return (
        any(provenance.layer is Layer.USER for provenance in read) and _violation(state, owner, excluding) is not None
    )


def _violation(state: _State, owner: str, constraint: Constraint) -> Rejection | None:
    """The rejection if a constraint is violated; None also if one of the values that it reads is rejected already."""
    reads, unknown = _names(constraint.argument, constraint.reads)
    if unknown is None and not reads.isdisjoint(state.refused):
        return None
    member = f"constraint {constraint.code} on {constraint.argument}"
    if unknown is not None:
        raise PluginError(owner, member, f"{unknown} is not an argument", "It must name arguments of srv.")
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
    for required in read:  # values that a backend requires: the user did not set them, so the message explains them
        if required.layer is Layer.BACKEND:
            shown_required = ARGUMENTS[required.argument].show(required.value)
            clause += f"; {required.argument} is {shown_required} because {required.reason}"
    return Rejection(constraint.code, constraint.argument, shown, provenance.owner, clause, constraint.remedy)


@functools.lru_cache(maxsize=1024)  # hardly more constraints are declared
def _names(argument: str, reads: tuple[str, ...]) -> tuple[frozenset[str], str | None]:
    """All that a constraint reads, and a name among these that is neither an argument nor a quantity."""
    names = frozenset((argument, *reads))
    unknown = next((name for name in names if name not in ARGUMENTS and name not in QUANTITIES), None)
    return names, argument if unknown is None and argument not in ARGUMENTS else unknown
