"""L2: every implementation of an op, compared with the op's contract.

The contracts (float64 oracles, generated inputs, tolerances per dtype) are in the distribution srv-kernels. srv depends
on it, but core does not import its modules, so they are looked up by name at run time.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from srv.platform.capabilities import OPS_OF
from srv.platform.experts import EXPERT_OPS, EXPERTS, MOE_FAMILY, ROUTE
from srv.platform.interface import OpArgs, OpImpl
from srv.platform.op_choice import choose_op
from srv.platform.ops import Ops, call_of
from srv.testing.conformance.facts import MODEL_OPS, OP_SIZE
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import declared_dtypes, dtype_of, is_native

CONTRACTS = "srv_kernels.contracts:CONTRACTS"
VIOLATIONS = "srv_kernels.contracts:violations"


def coverage(kit: Kit) -> str:
    """Each op that models need has an implementation in every declared dtype, no op is unknown, and plans are right."""
    by_op = contracts()
    optional = [op for capability, ops in OPS_OF.items() if capability in kit.capabilities for op in ops]
    if kit.manifest.facts.backends.get(MOE_FAMILY):
        optional += [ROUTE, EXPERTS]
    for op in (*MODEL_OPS, *optional):
        for dtype in declared_dtypes(kit):
            if not list(implementations(kit, op, dtype_of(dtype))):
                raise Fault(f"no implementation of {op} supports {dtype}, which is among the capabilities")
    unknown = sorted({impl.op for impl in kit.platform.ops} - set(by_op))
    if unknown:
        raise Fault(
            f"it implements {', '.join(unknown)}, for which there is no contract", f"Known ops: {', '.join(by_op)}."
        )
    _compare_with_facts(kit)
    return f"{len(kit.platform.ops)} implementations of {len({impl.op for impl in kit.platform.ops})} ops"


def _compare_with_facts(kit: Kit) -> None:
    """Fault unless plans and layers choose the same implementations, where the facts list any."""
    bound = {(impl.op, impl.name) for impl in kit.platform.ops}
    specs = [spec for spec in kit.manifest.facts.ops if spec.target or (spec.op, spec.name) in bound]
    if not specs:
        return
    for (name, contract), invariant in itertools.product(contracts().items(), (False, True)):
        ops = Ops(kit.name, kit.platform.ops, batch_invariant=invariant)
        for dtype in contract.dtypes:
            args = OpArgs(dtype, dict.fromkeys(contract.sizes, OP_SIZE))
            chosen = choose_op(specs, kit.device_facts, name, call_of(args), batch_invariant=invariant).spec
            planned, live = "" if chosen is None else chosen.name, ops.name_of(name, args)
            if planned != live:
                raise Fault(
                    f"{name} in {call_of(args).dtype}{' with batch invariance' if invariant else ''}: "
                    f"PlatformFacts.ops chooses {planned or 'nothing'}, and Platform.ops {live or 'nothing'}",
                    "Make Platform.ops from PlatformFacts.ops with srv.platform.ops.implementations.",
                )


def placement(kit: Kit) -> str:
    """Results are tensors on the platform's device."""
    dtype = dtype_of((*declared_dtypes(kit), "float32")[0])
    for name, contract in contracts().items():
        case = next(iter(contract.cases(dtype, 0)))
        args = [arg.to(kit.device) if isinstance(arg, torch.Tensor) else arg for arg in case.args]
        for impl in implementations(kit, name, dtype):
            results: object = function_of(impl)(*args)
            for result in results if isinstance(results, tuple) else (results,):
                if not isinstance(result, torch.Tensor):
                    raise Fault(f"{name} ({impl.name}) returned a {type(result).__name__}, not a tensor")
                if not same_device(result.device, kit.device):
                    raise Fault(f"{name} ({impl.name}) returned its result on {result.device}, not on {kit.device}")
    return f"on {kit.device}"


def rms_norm(kit: Kit) -> str:
    """RMS norm."""
    return check(kit, "rms_norm")


def add_rms_norm(kit: Kit) -> str:
    """RMS norm of a sum, which is returned too."""
    return check(kit, "add_rms_norm")


def rotary(kit: Kit) -> str:
    """Rotary position embedding."""
    return check(kit, "rotary")


def silu_and_mul(kit: Kit) -> str:
    """The gated activation."""
    return check(kit, "silu_and_mul")


def linear_w8a8(kit: Kit) -> str:
    """8-bit weights times dynamically quantized activations, with a scale per row."""
    return check(kit, "linear_w8a8")


def linear_w8a8_static(kit: Kit) -> str:
    """8-bit weights times statically quantized activations, with the checkpoint's scale."""
    return check(kit, "linear_w8a8_static")


def linear_int8(kit: Kit) -> str:
    """8-bit weights times unquantized activations."""
    return check(kit, "linear_int8")


def linear_fp8(kit: Kit) -> str:
    """FP8 weights times activations, with a scale per output or block."""
    return check(kit, "linear_fp8")


def linear_gguf(kit: Kit) -> str:
    """GGUF weights of every quantization type times activations."""
    return check(kit, "linear_gguf")


def rows_gguf(kit: Kit) -> str:
    """Embedding lookup in a quantized GGUF matrix: the selected rows, dequantized."""
    return check(kit, "rows_gguf")


def route_experts(kit: Kit) -> str:
    """The choice of each token's experts, and their weights."""
    return check(kit, "route_experts")


def experts(kit: Kit) -> str:
    """Experts with unquantized weights."""
    return check(kit, "experts")


def experts_int8(kit: Kit) -> str:
    """Experts with 8-bit weights."""
    return check(kit, "experts_int8")


def experts_gguf(kit: Kit) -> str:
    """Experts with GGUF weights."""
    return check(kit, "experts_gguf")


def experts_fp8(kit: Kit) -> str:
    """Experts with FP8 weights."""
    return check(kit, "experts_fp8")


def others(kit: Kit) -> str:
    """Ops that no model needs yet."""
    core_ops = (*MODEL_OPS, *(op for ops in OPS_OF.values() for op in ops), ROUTE, *EXPERT_OPS)
    names = sorted({impl.op for impl in kit.platform.ops} - set(core_ops))
    if not names:
        raise NotApplicable("the plugin implements no other op")
    return "; ".join(f"{name}: {check(kit, name)}" for name in names)


def check(kit: Kit, name: str) -> str:
    """Check every implementation in every dtype that it supports, with the contract's ordinary and adversarial inputs.

    Calls of sizes that it declares unsupported are left out, as core never makes them.
    """
    contract, violations = contracts()[name], pkgutil.resolve_name(VIOLATIONS)
    summaries: list[str] = []
    for dtype, impl in itertools.product(contract.dtypes, (impl for impl in kit.platform.ops if impl.op == name)):
        sizes = _Sizes(impl, dtype)
        problems = violations(
            contract,
            function_of(impl),
            dtype,
            kit.device,
            capabilities=kit.capabilities,
            large=is_native(kit),
            supports=sizes.supported,
        )
        if problems:
            further = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise Fault(
                f"{impl.name}, {_short(dtype)}: {problems[0]}{further}", f"The contract is: {contract.signature}."
            )
        if sizes.calls:
            summaries.append(f"{impl.name} in {_short(dtype)}{sizes.left_out()}")
    if not summaries:
        raise NotApplicable(f"the plugin implements no {name}")
    return ", ".join(summaries)


class _Sizes:
    """Which sizes one implementation of an op supports. `calls`: how many calls it was given."""

    def __init__(self, impl: OpImpl, dtype: torch.dtype) -> None:
        self._impl, self._dtype = impl, dtype
        self.calls = 0
        self._reasons: list[str] = []

    def supported(self, sizes: Mapping[str, int]) -> bool:
        reason = self._impl.supports_args(OpArgs(self._dtype, sizes))
        if reason is None:
            self.calls += 1
        else:
            self._reasons.append(reason)
        return reason is None

    def left_out(self) -> str:
        """For the message, how many calls it was not given, and one reason."""
        return f" ({len(self._reasons)} calls left out: {self._reasons[0]})" if self._reasons else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def implementations(kit: Kit, op: str, dtype: torch.dtype) -> Iterator[OpImpl]:
    """The implementations that support the dtype, at an ordinary size."""
    args = OpArgs(dtype, dict.fromkeys(contracts()[op].sizes, OP_SIZE))
    return (impl for impl in kit.platform.ops if impl.op == op and impl.supports_args(args) is None)


def function_of(impl: OpImpl) -> Any:
    return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target


def contracts() -> Mapping[str, Any]:
    try:
        by_op: Mapping[str, Any] = pkgutil.resolve_name(CONTRACTS)
    except ImportError as error:
        raise NotApplicable(
            f"the contracts of ops are in the distribution srv-kernels, which is not installed: {error}"
        ) from error
    return by_op
