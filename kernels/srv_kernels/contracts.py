"""Contracts that every implementation of an op must satisfy.

There is one `OpContract` per op: its signature, the sizes it is bound with, its dtypes, tolerances by dtype, the
float64 oracle, and a generator of ordinary and adversarial cases (`srv_kernels.cases`). Contracts do not depend on a
device; `violations` runs an implementation on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from srv_kernels import oracles
from srv_kernels.cases import (
    Case,
    add_rms_norm_cases,
    gelu_tanh_and_mul_cases,
    linear_gguf_cases,
    linear_w8a8_static_cases,
    rms_norm_cases,
    rotary_cases,
    rows_gguf_cases,
    scaled_linear_cases,
    silu_and_mul_cases,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= relative · |want| + scaled · (largest |want| of the result) + twice the smallest subnormal."""

    relative: float
    scaled: float


@dataclass(frozen=True)
class OpContract:
    """The contract of an op.

    signature: shapes and dtypes, for documentation. sizes: names of the sizes that an implementation is selected by.
    oracle: float64 results. cases: dtype and seed -> calls. reference: "module:function" of the plain-torch
    implementation. Implementations do not modify their arguments, return tensors of the model's dtype, and accept rows
    that are views into wider matrices.
    """

    name: str
    signature: str
    sizes: tuple[str, ...]
    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: Callable[[torch.dtype, int], Iterator[Case]]
    tolerances: Mapping[torch.dtype, Tolerance]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    reference: str = field(default="")


# Two roundings to the dtype (8, 11 or 24 bits of significand), with a small margin for the sums.
_TWO_ROUNDINGS = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-9),
    torch.float16: Tolerance(2.0**-10, 2.0**-12),
}
# Inputs may be quantized to int8 with a scale per 32 or more: each has a random error of up to half a scale.
_QUANTIZED_INPUTS = {dtype: Tolerance(2.0**-6, 2.0**-6) for dtype in DTYPES}
# Products of two scales (K-quants) may be rounded to float16.
_FLOAT16_SCALES = {
    torch.float32: Tolerance(2.0**-10, 2.0**-11),
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-8),
    torch.float16: Tolerance(2.0**-9, 2.0**-10),
}

# The largest element of a row is quantized to 127. One of K elements may be off by 1, since some implementations divide
# by the scale and others multiply by its inverse.
_QUANTIZED_ROWS = {dtype: Tolerance(2.0**-7, 2.0**-7) for dtype in DTYPES}


def _contract(
    oracle: Callable[..., Tensor | tuple[Tensor, ...]],
    cases: Callable[[torch.dtype, int], Iterator[Case]],
    signature: str,
    sizes: tuple[str, ...],
    tolerances: Mapping[torch.dtype, Tolerance],
) -> OpContract:
    """The contract of an op, which has the same name as its oracle and its reference implementation."""
    name = oracle.__name__
    return OpContract(name, signature, sizes, oracle, cases, tolerances, reference=f"srv_kernels.reference:{name}")


CONTRACTS: Mapping[str, OpContract] = {
    contract.name: contract
    for contract in (
        _contract(
            oracles.rms_norm,
            rms_norm_cases,
            signature="(x [..., D], weight [D], eps: float) -> [..., D]; all of the model's dtype",
            sizes=("dim",),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.add_rms_norm,
            add_rms_norm_cases,
            signature="(x [..., D], residual [..., D], weight [D], eps: float) -> (norm of residual + x, residual + x)",
            sizes=("dim",),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.rotary,
            rotary_cases,
            signature="(q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T]) -> (q', k'); "
            "cos_sin has R/2 cosines, then R/2 sines; pairs are (i, i + R/2); elements from R on are unchanged",
            sizes=("head_dim", "rotary_dim"),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.silu_and_mul,
            silu_and_mul_cases,
            signature="(x [..., 2 I]) -> [..., I]: silu of the first half times the second",
            sizes=("dim",),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.gelu_tanh_and_mul,
            gelu_tanh_and_mul_cases,
            signature="(x [..., 2 I]) -> [..., I]: gelu (its tanh approximation) of the first half times the second",
            sizes=("dim",),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.linear_w8a8,
            scaled_linear_cases,
            signature="(x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] as x | None) -> [T, N]; "
            "each row of x is quantized to int8, its largest magnitude to 127",
            sizes=("inputs", "outputs"),
            tolerances=_QUANTIZED_ROWS,
        ),
        _contract(
            oracles.linear_w8a8_static,
            linear_w8a8_static_cases,
            signature="(x [T, K], weight int8 [N, K], input_scale float32 [1], input_offset float32 [1], "
            "quant_bias int32 [N], deq_scale float32 [N]) -> [T, N]; x / input_scale + input_offset is rounded to int8",
            sizes=("inputs", "outputs"),
            tolerances=_QUANTIZED_ROWS,
        ),
        _contract(
            oracles.linear_int8,
            scaled_linear_cases,
            signature="(x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] as x | None) -> [T, N]; "
            "x is not quantized",
            sizes=("inputs", "outputs"),
            tolerances=_TWO_ROUNDINGS,
        ),
        _contract(
            oracles.linear_gguf,
            linear_gguf_cases,
            signature="(x [T, K], rows uint8 [N, bytes per row], quant_type: str) -> [T, N]; rows are those of a GGUF "
            "file quantized as `quant_type`; x may be quantized to 8 bits",
            sizes=("inputs", "outputs"),
            tolerances=_QUANTIZED_INPUTS,
        ),
        _contract(
            oracles.rows_gguf,
            rows_gguf_cases,
            signature="(rows uint8 [N, bytes per row], quant_type: str, indices int64 [T], dtype) -> [T, K] of dtype; "
            "the embedding lookup in the rows of a GGUF file quantized as `quant_type`",
            sizes=("inputs",),
            tolerances=_FLOAT16_SCALES,
        ),
    )
}


def violations(
    contract: OpContract,
    implementation: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[str]:
    """All violations of the contract by an implementation on its cases; empty if there are none."""
    found: list[str] = []
    for case in contract.cases(dtype, seed):
        args = tuple(_to_device(arg, device) for arg in case.args)
        expected, actual = _results(contract.oracle(*case.args)), _results(implementation(*args))
        found.extend(f"{contract.name}, {case.label}: argument {index} was changed" for index in _changed(case, args))
        if len(expected) != len(actual):
            found.append(f"{contract.name}, {case.label}: {len(actual)} results, not {len(expected)}")
            continue
        for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
            reason = _difference(want, got, dtype, contract.tolerances[dtype])
            if reason is not None:
                found.append(f"{contract.name}, {case.label}, result {index}: {reason}")
    return found


def _to_device(arg: Any, device: torch.device | str) -> Any:
    """A copy on the device, with the strides of the original."""
    if not isinstance(arg, Tensor):
        return arg
    copy = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    copy.copy_(arg)
    return copy


def _changed(case: Case, args: tuple[Any, ...]) -> list[int]:
    pairs = enumerate(zip(case.args, args, strict=True))
    return [index for index, (old, new) in pairs if isinstance(old, Tensor) and not torch.equal(old, new.to("cpu"))]


def _results(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _difference(want: Tensor, got: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> str | None:
    if got.dtype != dtype:
        return f"its dtype is {got.dtype}, not {dtype}"
    if got.shape != want.shape:
        return f"its shape is {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return None
    error = (got.to("cpu").double() - want).abs()
    limits = torch.finfo(dtype)
    two_subnormals = 2 * limits.smallest_normal * limits.eps
    allowed = tolerance.relative * want.abs() + tolerance.scaled * want.abs().max() + two_subnormals
    if bool((error <= allowed).all()):
        return None
    worst = int((error - allowed).nan_to_num(torch.inf).argmax())
    return f"element {worst} is {got.flatten()[worst].item():g}, not {want.flatten()[worst].item():g}"
