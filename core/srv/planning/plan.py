"""A launch that is only planned: resolved arguments and an estimated memory budget."""

from __future__ import annotations

from typing import NamedTuple

from srv.args.defaults import HOST_MEMORY, RESERVED_MEMORY
from srv.args.statement import Resolved, UserInput
from srv.planning.budget import Budget, estimate
from srv.planning.resolution import resolve_plan
from srv.planning.target import Target, find_target
from srv.specs import ModelFacts


class LaunchPlan(NamedTuple):
    """The result of a plan. `model` is None if no model is set and no demo model is installed."""

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    budget: Budget | None
    notes: tuple[str, ...]


def make_plan(user: UserInput) -> LaunchPlan:
    """Find device and model, resolve, estimate the budget. Refusal with everything that can be checked at once."""
    plan = resolve_plan(user, find_target, model_needed=False)
    if plan.model is None:
        return LaunchPlan(plan.target, None, plan.resolved, None, plan.notes)
    resolved, device = plan.resolved, plan.target.device
    shared = HOST_MEMORY in resolved.capabilities
    budget = estimate(resolved.config, plan.model, device, reserved_bytes(resolved), shared=shared)
    return LaunchPlan(plan.target, plan.model, plan.resolved, budget, plan.notes)


def reserved_bytes(resolved: Resolved) -> int:
    """Bytes that the resolved quantities keep free of weights and KV pool."""
    quantity = resolved.quantities.get(RESERVED_MEMORY)
    return int(quantity.total) if quantity else 0
