"""L2: every implementation of an op, compared with the op's contract.

The contracts (float64 oracles, generated inputs, tolerances per dtype) are in the distribution srv-kernels. srv depends
on it, but core does not import its modules, so they are looked up by name at run time.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from srv.platform.capabilities import OPS_OF
from srv.platform.interface import OpArgs, OpImpl
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import declared_dtypes, dtype_of

CONTRACTS = "srv_kernels.contracts:CONTRACTS"
VIOLATIONS = "srv_kernels.contracts:violations"
MODEL_OPS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")  # the ops that the layers of every model use
_SIZE = 64  # of every dimension when `supports_args` is called


def coverage(kit: Kit) -> str:
    """Each op that models need has an implementation in every declared dtype, and no op is unknown."""
    known = contracts()
    optional = [op for capability, ops in OPS_OF.items() if capability in kit.capabilities for op in ops]
    for op in (*MODEL_OPS, *optional):
        for dtype in declared_dtypes(kit):
            if not list(_implementations(kit, op, dtype_of(dtype))):
                raise Fault(f"no implementation of {op} supports {dtype}, which is among the capabilities")
    unknown = sorted({impl.op for impl in kit.platform.ops} - set(known))
    if unknown:
        raise Fault(
            f"it implements {', '.join(unknown)}, for which there is no contract", f"Known ops: {', '.join(known)}."
        )
    return f"{len(kit.platform.ops)} implementations of {len({impl.op for impl in kit.platform.ops})} ops"


def placement(kit: Kit) -> str:
    """Results are tensors on the platform's device."""
    dtype = dtype_of((*declared_dtypes(kit), "float32")[0])
    for name, contract in contracts().items():
        case = next(iter(contract.cases(dtype, 0)))
        args = [arg.to(kit.device) if isinstance(arg, torch.Tensor) else arg for arg in case.args]
        for impl in _implementations(kit, name, dtype):
            results: object = _function(impl)(*args)
            for result in results if isinstance(results, tuple) else (results,):
                if not isinstance(result, torch.Tensor):
                    raise Fault(f"{name} ({impl.name}) returned a {type(result).__name__}, not a tensor")
                if not same_device(result.device, kit.device):
                    raise Fault(f"{name} ({impl.name}) returned its result on {result.device}, not on {kit.device}")
    return f"on {kit.device}"


def rms_norm(kit: Kit) -> str:
    """RMS norm."""
    return _check(kit, "rms_norm")


def add_rms_norm(kit: Kit) -> str:
    """RMS norm of a sum, which is returned too."""
    return _check(kit, "add_rms_norm")


def rotary(kit: Kit) -> str:
    """Rotary position embedding."""
    return _check(kit, "rotary")


def silu_and_mul(kit: Kit) -> str:
    """The gated activation."""
    return _check(kit, "silu_and_mul")


def linear_w8a8(kit: Kit) -> str:
    """8-bit weights times dynamically quantized activations, with a scale per row."""
    return _check(kit, "linear_w8a8")


def linear_w8a8_static(kit: Kit) -> str:
    """8-bit weights times statically quantized activations, with the checkpoint's scale."""
    return _check(kit, "linear_w8a8_static")


def linear_int8(kit: Kit) -> str:
    """8-bit weights times unquantized activations."""
    return _check(kit, "linear_int8")


def linear_gguf(kit: Kit) -> str:
    """GGUF weights of every quantization type times activations."""
    return _check(kit, "linear_gguf")


def rows_gguf(kit: Kit) -> str:
    """Embedding lookup in a quantized GGUF matrix: the selected rows, dequantized."""
    return _check(kit, "rows_gguf")


def others(kit: Kit) -> str:
    """Ops that no model needs yet."""
    known = (*MODEL_OPS, *(op for ops in OPS_OF.values() for op in ops))
    names = sorted({impl.op for impl in kit.platform.ops} - set(known))
    if not names:
        raise NotApplicable("the plugin implements no other op")
    return "; ".join(_check(kit, name) for name in names)


def _check(kit: Kit, name: str) -> str:
    """Every implementation in every dtype that it supports, with the contract's ordinary and adversarial inputs."""
    contract, violations = contracts()[name], pkgutil.resolve_name(VIOLATIONS)
    seen: list[str] = []
    for dtype in contract.dtypes:
        for impl in _implementations(kit, name, dtype):
            found = violations(contract, _function(impl), dtype, kit.device)
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                raise Fault(
                    f"{impl.name}, {str(dtype).removeprefix('torch.')}: {found[0]}{more}",
                    f"The contract is: {contract.signature}.",
                )
            seen.append(f"{impl.name} in {str(dtype).removeprefix('torch.')}")
    if not seen:
        raise NotApplicable(f"the plugin implements no {name}")
    return ", ".join(seen)


def _implementations(kit: Kit, op: str, dtype: torch.dtype) -> Iterator[OpImpl]:
    """The implementations that support the dtype, at an ordinary size."""
    args = OpArgs(dtype, dict.fromkeys(contracts()[op].sizes, _SIZE))
    return (impl for impl in kit.platform.ops if impl.op == op and impl.supports_args(args) is None)


def _function(impl: OpImpl) -> Any:
    return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target


def contracts() -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = pkgutil.resolve_name(CONTRACTS)
    except ImportError as error:
        raise NotApplicable(
            f"the contracts of ops are in the distribution srv-kernels, which is not installed: {error}"
        ) from error
    return found
