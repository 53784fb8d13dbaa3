"""Sums of the contributions of several owners to one quantity, such as reserved device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.statement import QuantityPart
from srv.errors import PluginError
from srv.platform.facts import Contribution


def sum_parts(
    facts: Facts, values: Mapping[str, Any], contributions: Sequence[tuple[str, Contribution]]
) -> tuple[QuantityPart, ...]:
    """The parts of a quantity, each with its owner: absolute amounts, then shares of the device memory that is left.

    `values`: the resolved arguments and quantities that the contributions read. PluginError if one is invalid.
    """
    parts: list[QuantityPart] = []
    for owner, contribution in sorted(contributions, key=lambda owned: owned[1].of_remaining):
        amount = _amount(facts, values, owner, contribution)
        if contribution.of_remaining:
            remaining = (facts.device.memory_bytes if facts.device else 0) - sum(part.amount for part in parts)
            amount *= max(0, remaining)
        parts.append(QuantityPart(contribution.name, owner, amount, contribution.reason, contribution.for_default))
    return tuple(parts)


def _amount(facts: Facts, values: Mapping[str, Any], owner: str, contribution: Contribution) -> float:
    member = f"contribution {contribution.name} to {contribution.quantity}"
    context = DeclaredReadsContext(owner, member, facts, contribution.reads, values)
    amount: object = call_plugin(owner, member, contribution.compute, context)
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise PluginError(owner, member, f"it returned {type(amount).__name__}", "It must return a number.")
    if contribution.of_remaining and not 0 <= amount <= 1:
        raise PluginError(owner, member, f"it returned {amount}", "A share must be between 0 and 1.")
    return amount
