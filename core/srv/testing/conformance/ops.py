"""L2: every implementation of an op against its contract.

The contracts (float64 oracles, generated inputs, tolerances by dtype) are those of the distribution srv-kernels, which
srv depends on; core imports none of its modules, so they are found by name here and at run time.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from srv.platform.interface import OpArgs, OpImpl
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import declared_dtypes, dtype_of

CONTRACTS = "srv_kernels.contracts:CONTRACTS"
VIOLATIONS = "srv_kernels.contracts:violations"
MODEL_OPS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")  # those that every model's layers bind
OPS_OF = {
    "w8a8": ("linear_w8a8", "linear_w8a8_static"),
    "int8_weights": ("linear_int8",),
    "gguf_blocks": ("linear_gguf", "rows_gguf"),
}  # those that layers bind where a capability is declared
_SIZE = 64  # of every dimension that an implementation is asked about


def coverage(kit: Kit) -> str:
    """Each op that models need has an implementation in every declared dtype, and each one is of a known op."""
    known = contracts()
    further = [op for word, ops in OPS_OF.items() if word in kit.capabilities for op in ops]
    for op in (*MODEL_OPS, *further):
        for dtype in declared_dtypes(kit):
            if not list(_implementations(kit, op, dtype_of(dtype))):
                raise Fault(f"no implementation of {op} takes {dtype}, which is among the capabilities")
    unknown = sorted({impl.op for impl in kit.platform.ops} - set(known))
    if unknown:
        raise Fault(f"it implements {', '.join(unknown)}, which no contract describes", f"Known: {', '.join(known)}.")
    return f"{len(kit.platform.ops)} implementations of {len({impl.op for impl in kit.platform.ops})} ops"


def placement(kit: Kit) -> str:
    """Results are tensors on the platform's device."""
    dtype = dtype_of((*declared_dtypes(kit), "float32")[0])
    for name, contract in contracts().items():
        case = next(iter(contract.cases(dtype, 0)))
        args = [arg.to(kit.device) if isinstance(arg, torch.Tensor) else arg for arg in case.args]
        for impl in _implementations(kit, name, dtype):
            given: object = _function(impl)(*args)
            for result in given if isinstance(given, tuple) else (given,):
                if not isinstance(result, torch.Tensor):
                    raise Fault(f"{name} ({impl.name}) gave a {type(result).__name__}, not a tensor")
                if not same_device(result.device, kit.device):
                    raise Fault(f"{name} ({impl.name}) gave its result on {result.device}, not on {kit.device}")
    return f"on {kit.device}"


def rms_norm(kit: Kit) -> str:
    """Root-mean-square norm."""
    return _check(kit, "rms_norm")


def add_rms_norm(kit: Kit) -> str:
    """The same of a sum, which is returned too."""
    return _check(kit, "add_rms_norm")


def rotary(kit: Kit) -> str:
    """Rotary position embedding."""
    return _check(kit, "rotary")


def silu_and_mul(kit: Kit) -> str:
    """The gated activation."""
    return _check(kit, "silu_and_mul")


def linear_w8a8(kit: Kit) -> str:
    """A product of 8-bit weights with rows that are rounded each by its own largest magnitude."""
    return _check(kit, "linear_w8a8")


def linear_w8a8_static(kit: Kit) -> str:
    """A product of 8-bit weights with inputs that are rounded by a scale of the checkpoint's."""
    return _check(kit, "linear_w8a8_static")


def linear_int8(kit: Kit) -> str:
    """A product of 8-bit weights with rows as they are."""
    return _check(kit, "linear_int8")


def linear_gguf(kit: Kit) -> str:
    """A product with the blocks of a GGUF file, of every type."""
    return _check(kit, "linear_gguf")


def rows_gguf(kit: Kit) -> str:
    """Rows of a matrix in the blocks of a GGUF file."""
    return _check(kit, "rows_gguf")


def others(kit: Kit) -> str:
    """Ops that no model needs yet."""
    known = (*MODEL_OPS, *(op for ops in OPS_OF.values() for op in ops))
    names = sorted({impl.op for impl in kit.platform.ops} - set(known))
    if not names:
        raise NotApplicable("the plugin implements no further op")
    return "; ".join(_check(kit, name) for name in names)


def _check(kit: Kit, name: str) -> str:
    """Every implementation in every dtype that it takes, on the contract's ordinary and adversarial inputs."""
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
    """Those that take the dtype, at an ordinary size."""
    args = OpArgs(dtype, dict.fromkeys(contracts()[op].sizes, _SIZE))
    return (impl for impl in kit.platform.ops if impl.op == op and impl.supports_args(args) is None)


def _function(impl: OpImpl) -> Any:
    return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target


def contracts() -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = pkgutil.resolve_name(CONTRACTS)
    except ImportError as error:
        raise NotApplicable(
            f"the contracts of ops are in the distribution srv-kernels, which is missing: {error}"
        ) from error
    return found
