"""A launch that is only planned: resolved arguments and an estimated memory budget."""

from __future__ import annotations

import math
from typing import NamedTuple

from srv.args.defaults import HOST_MEMORY, RESERVED_MEMORY
from srv.args.statement import Layer, Quantity, Resolved, UserInput
from srv.dist.mesh import all_ranks
from srv.errors import Refusal, Rejection
from srv.io.memory_lines import MemoryLine
from srv.planning.budget import Budget, estimate
from srv.planning.expert_location import ExpertLocation
from srv.planning.kernels import KernelPlan, divides
from srv.planning.ledger import predict
from srv.planning.replicas import of_replica
from srv.planning.resolution import FindModel, FindTarget, resolve_plan
from srv.planning.target import Target, find_target
from srv.planning.weights import UNKNOWN_SIZE
from srv.specs import ModelFacts

_DIVIDING = ("pp_size",)


class LaunchPlan(NamedTuple):
    """The result of a plan. `model` is None if no model is set and no demo model is installed.

    `refusals`: why a launch would end, although everything else could be computed: before it reads weights, or (with
    `budget` None) because of the memory, which a launch measures once it has read them, and a plan estimates. `budget`
    is also None without a model, and with sizes that are not known (`ModelFacts.unknown_sizes`).
    `unchecked`: what only a launch finds out.
    `ledger`: the predicted lines of the memory of one rank; () without a budget. `kernels`: what computes each part.
    `experts`: what --init-expert-location says of the model's experts; None if it has none.
    """

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    budget: Budget | None
    notes: tuple[str, ...]
    refusals: tuple[Rejection, ...] = ()
    unchecked: tuple[str, ...] = ()
    ledger: tuple[MemoryLine, ...] = ()
    kernels: KernelPlan = KernelPlan(())
    experts: ExpertLocation | None = None


def make_plan(user: UserInput, find: FindTarget = find_target, find_model: FindModel | None = None) -> LaunchPlan:
    """Find device and model, resolve, estimate the budget. Refusal if there is nothing to show but refusals.

    find, find_model: as in `resolve_plan`.

    Planned values, and values that violate a constraint, are resolved like others, and are among its `refusals`.
    """
    plan = resolve_plan(user, find, find_model=find_model, model_needed=False, on_this_host=False, carry=True)
    refusals = [*plan.resolved.refusals, *plan.check.refusals]
    budget, ledger = None, tuple[MemoryLine, ...]()
    if plan.model is not None and plan.check.has_pools and divides(plan.resolved):
        resolved, device = plan.resolved, plan.target.device
        shared = HOST_MEMORY in resolved.capabilities
        try:
            config = of_replica(resolved.config)
            budget = estimate(config, plan.model, device, reserved_bytes(resolved), shared=shared)
            ledger = predict(config, plan.model, reserved_parts(resolved), budget)
        except Refusal as refusal:
            refused = plan.check.refusals  # downloading weights, to know their size, does not help against these
            refusals += [rejection for rejection in refusal.rejections if rejection.code != UNKNOWN_SIZE or not refused]
    notes = (*plan.notes, *_unused_devices(plan.resolved), *_outside_memory(plan.resolved))
    return LaunchPlan(
        plan.target,
        plan.model,
        plan.resolved,
        budget,
        notes,
        refusals=tuple(dict.fromkeys(refusals)),
        unchecked=plan.check.unchecked,
        ledger=ledger,
        kernels=plan.check.kernels,
        experts=plan.experts,
    )


def _unused_devices(resolved: Resolved) -> tuple[str, ...]:
    """A note if the described machine has devices without a rank."""
    device, ranks = resolved.device, all_ranks(resolved.config.get)
    if device is None or HOST_MEMORY in resolved.capabilities or ranks >= device.count:
        return ()
    rank = "one rank uses one" if ranks == 1 else f"{ranks} ranks use {ranks}"
    return (f"device: {rank} of the {device.count} devices; the others are not used",)


def _outside_memory(resolved: Resolved) -> tuple[str, ...]:
    """A note on planned values that would divide weights or KV pool in a way that the budget does not know."""
    values = [refusal.what for refusal in resolved.refusals if refusal.code == "planned" and refusal.what in _DIVIDING]
    if not values:
        return ()
    return (f"the memory of weights and KV pool is that of tp_size alone, without {', '.join(values)}",)


def reserved_bytes(resolved: Resolved) -> int:
    """Bytes that the resolved quantities keep free of weights and KV pool."""
    return int(sum(reserved_parts(resolved).values()))


def reserved_parts(resolved: Resolved) -> dict[str, float]:
    """The parts of these bytes by name; those of several owners with one name are added.

    What a published rule reserves to find the default of `mem_fraction_static` is at most what a fraction of the user's
    leaves.
    """
    quantity, parts = resolved.quantities.get(RESERVED_MEMORY), dict[str, float]()
    available = _left_by_user(resolved, quantity)
    for part in quantity.parts if quantity else ():
        amount = min(part.amount, available) if part.for_default else part.amount
        parts[part.name] = parts.get(part.name, 0.0) + amount
    return parts


def _left_by_user(resolved: Resolved, quantity: Quantity | None) -> float:
    """The bytes that a fraction set by the user leaves beside what is reserved in any case; infinite without one."""
    if (
        quantity is None
        or resolved.device is None
        or resolved.provenance["mem_fraction_static"].layer is not Layer.USER
    ):
        return math.inf
    free = (1 - resolved.config.memory.mem_fraction_static) * resolved.device.memory_bytes
    return max(0.0, free - sum(part.amount for part in quantity.parts if not part.for_default))
