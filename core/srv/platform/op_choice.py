"""The choice of an op's implementation from a platform's facts, without the device and without torch.

`srv.platform.ops` makes the same choice from the live implementations when layers are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from srv.platform.facts import DeviceFacts, OpCall, OpSpec

NOT_INVARIANT = "it is not batch invariant, as enable_deterministic_inference requires"
# The arguments that name the implementation of an op, by the op.
NAMED_BY: Mapping[str, str] = {"linear_fp8": "fp8_gemm_backend"}
AUTO, TORCH_NATIVE = "auto", "torch_native"
PRECISION, FULL_PRECISION = "activation_precision", "full"  # the argument, and its value that excludes those that round


class OpChoice(NamedTuple):
    """The implementation for one call, or None. `rejected`: the others that the platform has, each with its reason.

    `slower`: why none of the faster implementations fits, if a fallback or nothing was chosen; "" if the platform has
    only fallbacks for the op.
    """

    spec: OpSpec | None
    rejected: tuple[tuple[str, str], ...]
    slower: str = ""


def argument_name(implementation: str) -> str:
    """The name by which an argument chooses an implementation: PyTorch's operators have one on every platform."""
    return TORCH_NATIVE if implementation.startswith("torch ") else implementation


def argument_names(specs: Iterable[OpSpec], op: str) -> tuple[str, ...]:
    """The names of the implementations that a platform has for an op, best first."""
    return tuple(dict.fromkeys(argument_name(spec.name) for spec in specs if spec.op == op))


def not_named(op: str, implementation: str, named_ops: Mapping[str, str]) -> str | None:
    """Why an implementation cannot be chosen, if an argument names another. `named_ops`: values of `NAMED_BY`."""
    value = named_ops.get(op, AUTO)
    return None if value in (AUTO, argument_name(implementation)) else f"{NAMED_BY[op]} is {value}"


def too_coarse(rounds: str, *, full: bool) -> str | None:
    """Why an implementation cannot be chosen that rounds activations so; `full`: none may round them."""
    return f"it {rounds}, and {PRECISION} is {FULL_PRECISION}" if full and rounds else None


def choose_op(
    specs: Iterable[OpSpec],
    device: DeviceFacts,
    op: str,
    call: OpCall,
    *,
    batch_invariant: bool = False,
    named: Mapping[str, str] = MappingProxyType({}),
    full: bool = False,
) -> OpChoice:
    """The first implementation of an op that fits; `specs`: those of a platform, best first.

    `named`: the values of arguments that name implementations, by op. `full`: none may round activations.
    """
    chosen: OpSpec | None = None
    rejected: list[tuple[str, str]] = []
    faster: list[str] = []
    for spec in specs:
        if spec.op != op:
            continue
        unwanted = not_named(op, spec.name, named) or too_coarse(spec.rounds, full=full)
        reason = unwanted or spec.check(device, call)
        if reason is None and batch_invariant and not spec.batch_invariant:
            reason = NOT_INVARIANT
        if reason is None and chosen is None:
            chosen = spec
        else:
            rejected.append((spec.name, reason or f"fits, but the platform prefers {chosen.name if chosen else ''}"))
            if not spec.fallback and unwanted is None:
                faster.append(f"{spec.name}: {reason}")
    slower = "; ".join(faster) if chosen is None or chosen.fallback else ""
    return OpChoice(chosen, tuple(rejected), slower)


def op_key(op: str, dtype: str, sizes: Mapping[str, int]) -> str:
    """How plans and running engines name an op's calls: "rms_norm bfloat16 dim=576"."""
    return " ".join((op, dtype, *(f"{name}={size}" for name, size in sorted(sizes.items()))))
