"""The choice of an op's implementation from a platform's facts, without the device and without torch.

`srv.platform.ops` makes the same choice from the live implementations when layers are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from srv.platform.facts import DeviceFacts, OpCall, OpSpec

NOT_INVARIANT = "it is not batch invariant, as enable_deterministic_inference requires"


class OpChoice(NamedTuple):
    """The implementation for one call, or None. `rejected`: the others that the platform has, each with its reason.

    `slower`: why none of the faster implementations fits, if a fallback or nothing was chosen; "" if the platform has
    only fallbacks for the op.
    """

    spec: OpSpec | None
    rejected: tuple[tuple[str, str], ...]
    slower: str = ""


def choose_op(
    specs: Iterable[OpSpec], device: DeviceFacts, op: str, call: OpCall, *, batch_invariant: bool = False
) -> OpChoice:
    """The first implementation of an op that fits; `specs`: those of a platform, best first."""
    chosen: OpSpec | None = None
    rejected: list[tuple[str, str]] = []
    faster: list[str] = []
    for spec in specs:
        if spec.op != op:
            continue
        reason = spec.check(device, call)
        if reason is None and batch_invariant and not spec.batch_invariant:
            reason = NOT_INVARIANT
        if reason is None and chosen is None:
            chosen = spec
        else:
            rejected.append((spec.name, reason or f"fits, but the platform prefers {chosen.name if chosen else ''}"))
            if not spec.fallback:
                faster.append(f"{spec.name}: {reason}")
    slower = "; ".join(faster) if chosen is None or chosen.fallback else ""
    return OpChoice(chosen, tuple(rejected), slower)


def op_key(op: str, dtype: str, sizes: Mapping[str, int]) -> str:
    """How plans and running engines name an op's calls: "rms_norm bfloat16 dim=576"."""
    return " ".join((op, dtype, *(f"{name}={size}" for name, size in sorted(sizes.items()))))
