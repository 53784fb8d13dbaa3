"""What every implementation of an op promises, and the inputs on which it is held to that.

One `OpContract` an op: its signature, the sizes it is bound with, its dtypes, tolerances by dtype, the
float64 oracle, and a generator of ordinary and adversarial cases. Knows no device; `violations` runs an
implementation on whichever device it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from srv_kernels import oracles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= relative · |want| + scaled · (the largest |want| of the case), and two subnormal steps."""

    relative: float
    scaled: float


@dataclass(frozen=True, slots=True)
class Case:
    """One call: a label for messages, and positional arguments on the host."""

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class OpContract:
    """An op.

    signature: shapes and dtypes, for people. sizes: names of the sizes that an implementation is chosen by.
    oracle: float64 results. cases: dtype and seed -> calls. reference: "module:function" of the plain-torch
    implementation. An implementation changes none of its arguments, returns tensors of the model's dtype,
    and takes rows that are views into wider matrices.
    """

    name: str
    signature: str
    sizes: tuple[str, ...]
    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: Callable[[torch.dtype, int], Iterator[Case]]
    tolerances: Mapping[torch.dtype, Tolerance]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    reference: str = field(default="")


# Two roundings of the dtype (8, 11 or 24 bits of significand), with a little room for the sums.
_ROUNDED = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-9),
    torch.float16: Tolerance(2.0**-10, 2.0**-12),
}
# Magnitudes whose results stay within every dtype, half precision included.
_MAGNITUDES = (1.0, 1e-3, 1e3)


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def _spaced(generator: torch.Generator, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows that are a slice of a wider matrix, as the split of a fused projection gives them."""
    return _random(generator, rows, dim + 24, dtype=dtype)[:, 8 : 8 + dim]


def _matrices(dtype: torch.dtype, seed: int, dims: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for rows in (0, 1, 3, 17):
        for dim in dims:
            yield f"{rows}x{dim}", _random(generator, rows, dim, dtype=dtype)
            yield f"{rows}x{dim} of a wider matrix", _spaced(generator, rows, dim, dtype)
    for scale in _MAGNITUDES:
        yield f"magnitude {scale:g}", _random(generator, 5, dims[-1], dtype=dtype, scale=scale)
    yield "zeros", torch.zeros(2, dims[-1], dtype=dtype)
    outlier = torch.full((1, dims[-1]), 1e-3, dtype=dtype)
    outlier[0, -1] = 1e3
    yield "one outlier among small entries", outlier
    yield "many rows", _random(generator, 300, dims[-1], dtype=dtype)


_NORM_DIMS = (64, 97, 576)


def _rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 1)
    for label, x in _matrices(dtype, seed, _NORM_DIMS):
        weight = (1 + 0.5 * torch.randn(x.shape[-1], generator=generator)).to(dtype)
        yield Case(label, (x, weight, 1e-5))


def _add_rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 2)
    for label, x in _matrices(dtype, seed, _NORM_DIMS):
        weight = (1 + 0.5 * torch.randn(x.shape[-1], generator=generator)).to(dtype)
        residual = _random(generator, *x.shape, dtype=dtype, scale=3.0)
        yield Case(label, (x, residual, weight, 1e-6))


def _silu_and_mul_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for label, x in _matrices(dtype, seed, (2, 62, 3072)):
        # 100² fits half precision; silu's own hard inputs are large negative gates, where it must give 0.
        yield Case(label, (x.clamp(-100, 100) if x.is_contiguous() else x,))
    gates = torch.tensor([[-1e3, -90.0, -20.0, -1e-4, 0.0, 1e-4, 20.0, 90.0]], dtype=dtype)
    yield Case("gates from -1000 to 90", (torch.cat((gates, torch.full_like(gates, 2.0)), -1),))


def _rotary_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 3)
    shapes = ((0, 4, 2, 64, 64), (1, 9, 3, 64, 64), (3, 4, 4, 128, 128), (17, 8, 1, 32, 32), (5, 4, 2, 80, 20))
    for tokens, heads, kv_heads, dim, turned in shapes:
        for scale in _MAGNITUDES:
            fused = _random(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=scale)
            q, k, _ = fused.split((heads * dim, kv_heads * dim, kv_heads * dim), -1)
            cos_sin, positions = _table(generator, tokens, turned)
            args = (q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), cos_sin, positions)
            yield Case(f"{tokens} tokens, {heads}/{kv_heads} heads of {dim}, {turned} turned, x {scale:g}", args)
    q, k = (_random(generator, 2, heads, 64, dtype=dtype) for heads in (4, 2))
    yield Case("the same position twice", (q, k, *(_table(generator, 1, 64)[0], torch.tensor([7, 7]))))


def _table(generator: torch.Generator, tokens: int, turned: int) -> tuple[Tensor, Tensor]:
    places = 4096
    angles = torch.arange(places)[:, None] * 10000.0 ** -(torch.arange(turned // 2) / (turned // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    return cos_sin, torch.randint(places, (tokens,), generator=generator)


def _int8(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _linear_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor, int, torch.Generator]]:
    """(label, x [T, K], N, generator): few and many rows, K beyond what float32 sums exactly, hard rows."""
    generator = torch.Generator().manual_seed(seed + 4)
    for rows, inputs, outputs in ((1, 64, 96), (3, 96, 64), (17, 576, 192), (2, 1536, 64), (130, 64, 32)):
        yield f"{rows}x{inputs} to {outputs}", _random(generator, rows, inputs, dtype=dtype), outputs, generator
    yield "rows of a wider matrix", _spaced(generator, 5, 64, dtype), 32, generator
    for scale in _MAGNITUDES:
        yield f"magnitude {scale:g}", _random(generator, 4, 64, dtype=dtype, scale=scale), 32, generator
    mixed = _random(generator, 3, 64, dtype=dtype)
    mixed[0] = 0
    mixed[1, 7] = 1e3
    yield "a row of zeros, and one with an outlier", mixed, 32, generator


def _linear_w8a8_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for index, (label, x, outputs, generator) in enumerate(_linear_inputs(dtype, seed)):
        weight = _int8(generator, outputs, x.shape[1])
        scale = torch.rand(outputs, generator=generator) * 1e-3 + 1e-5
        bias = _random(generator, outputs, dtype=dtype) if index % 2 else None
        yield Case(f"{label}{', with a bias' if index % 2 else ''}", (x, weight, scale, bias))


def _linear_w8a8_static_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for label, x, outputs, generator in _linear_inputs(dtype, seed):
        weight = _int8(generator, outputs, x.shape[1])
        largest = float(x.float().abs().max()) or 1.0
        # A power of two divides exactly, so that no implementation stands at another side of a half.
        scale = torch.tensor([2.0 ** math.ceil(math.log2(largest / 100))])
        offset = torch.randint(-20, 21, (1,), generator=generator).float()
        bias = (
            -(offset.int() * weight.int().sum(1)).int() + torch.randint(-99, 100, (outputs,), generator=generator).int()
        )
        deq_scale = scale * (torch.rand(outputs, generator=generator) * 1e-3 + 1e-5)
        yield Case(label, (x, weight, scale, offset, bias, deq_scale))


# The largest entry of a row is 127 steps, and a step more or less in one of K entries is allowed: implementations
# divide by the scale or multiply by its inverse.
_STEPPED = {dtype: Tolerance(2.0**-7, 2.0**-7) for dtype in DTYPES}

CONTRACTS: Mapping[str, OpContract] = {
    contract.name: contract
    for contract in (
        OpContract(
            name="rms_norm",
            signature="(x [..., D], weight [D], eps: float) -> [..., D]; all of the model's dtype",
            sizes=("dim",),
            oracle=oracles.rms_norm,
            cases=_rms_norm_cases,
            tolerances=_ROUNDED,
            reference="srv_kernels.reference:rms_norm",
        ),
        OpContract(
            name="add_rms_norm",
            signature="(x [..., D], residual [..., D], weight [D], eps: float) -> (norm of residual + x, residual + x)",
            sizes=("dim",),
            oracle=oracles.add_rms_norm,
            cases=_add_rms_norm_cases,
            tolerances=_ROUNDED,
            reference="srv_kernels.reference:add_rms_norm",
        ),
        OpContract(
            name="rotary",
            signature="(q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T]) -> (q', k'); "
            "cosines are the first R/2 columns, sines the last; pairs are (i, i + R/2); entries from R on stay",
            sizes=("head_dim", "rotary_dim"),
            oracle=oracles.rotary,
            cases=_rotary_cases,
            tolerances=_ROUNDED,
            reference="srv_kernels.reference:rotary",
        ),
        OpContract(
            name="silu_and_mul",
            signature="(x [..., 2 I]) -> [..., I]: silu of the first half times the second",
            sizes=("dim",),
            oracle=oracles.silu_and_mul,
            cases=_silu_and_mul_cases,
            tolerances=_ROUNDED,
            reference="srv_kernels.reference:silu_and_mul",
        ),
        OpContract(
            name="linear_w8a8",
            signature="(x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] | None) -> [T, N]; "
            "each row of x is rounded to 127 steps of its largest magnitude",
            sizes=("inputs", "outputs"),
            oracle=oracles.linear_w8a8,
            cases=_linear_w8a8_cases,
            tolerances=_STEPPED,
            reference="srv_kernels.reference:linear_w8a8",
        ),
        OpContract(
            name="linear_w8a8_static",
            signature="(x [T, K], weight int8 [N, K], input_scale float32 [1], input_offset float32 [1], "
            "quant_bias int32 [N], deq_scale float32 [N]) -> [T, N]; x / input_scale + input_offset is rounded to int8",
            sizes=("inputs", "outputs"),
            oracle=oracles.linear_w8a8_static,
            cases=_linear_w8a8_static_cases,
            tolerances=_STEPPED,
            reference="srv_kernels.reference:linear_w8a8_static",
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
    """Every way in which an implementation breaks the contract on its cases; empty: none."""
    found: list[str] = []
    for case in contract.cases(dtype, seed):
        args = tuple(_to_device(arg, device) for arg in case.args)
        wanted, got = _results(contract.oracle(*case.args)), _results(implementation(*args))
        found.extend(f"{contract.name}, {case.label}: argument {index} was changed" for index in _changed(case, args))
        if len(wanted) != len(got):
            found.append(f"{contract.name}, {case.label}: {len(got)} results, not {len(wanted)}")
            continue
        for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
            reason = _difference(want, have, dtype, contract.tolerances[dtype])
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


def _difference(want: Tensor, have: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> str | None:
    if have.dtype != dtype:
        return f"its dtype is {have.dtype}, not {dtype}"
    if have.shape != want.shape:
        return f"its shape is {tuple(have.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return None
    error = (have.to("cpu").double() - want).abs()
    limits = torch.finfo(dtype)
    two_subnormals = 2 * limits.smallest_normal * limits.eps
    allowed = tolerance.relative * want.abs() + tolerance.scaled * want.abs().max() + two_subnormals
    if bool((error <= allowed).all()):
        return None
    worst = int((error - allowed).nan_to_num(torch.inf).argmax())
    return f"{have.flatten()[worst].item():g} where {want.flatten()[worst].item():g} is right, at entry {worst}"
