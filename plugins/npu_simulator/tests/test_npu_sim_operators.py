"""All other operators compared with independent float64 references, for random shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
# Rounded once from float32, so half a ULP plus a margin.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def shapes(seed: int, count: int = 4, multiple: int = 1) -> list[tuple[int, ...]]:
    """Random shapes, the same in every run, of two to four dimensions; the last is a multiple of `multiple`."""
    chance = random.Random(seed)
    leading = [tuple(chance.randint(1, 7) for _ in range(chance.randint(1, 3))) for _ in range(count)]
    return [(*lead, multiple * chance.randint(1, 200)) for lead in leading]


def close(actual: Tensor, expected: Tensor) -> None:
    """expected: float64 on the host."""
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=limit, rtol=limit)


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    rows = x.double().reshape(-1, gamma.numel())
    weights = gamma.double().flatten()
    normal = [row / (sum(value * value for value in row) / len(row) + epsilon).sqrt() * weights for row in rows]
    return torch.stack(normal).reshape(x.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 30), (1, 576), *shapes(1)])
def test_rms_norm(sdk: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gamma = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y, rstd = sdk.npu_rms_norm(x.to("npu:0"), gamma.to("npu:0"), 1e-5)
    assert y.dtype is dtype
    close(y, normed(x, gamma, 1e-5))
    assert rstd.dtype is torch.float32
    expected = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_rms_norm_takes_a_float32_gamma_and_several_dimensions(sdk: Any) -> None:
    x, gamma = torch.randn(2, 3, 4).half(), torch.randn(3, 4)
    y, rstd = sdk.npu_rms_norm(x.to("npu:0"), gamma.to("npu:0"))
    close(y, normed(x, gamma, 1e-6))
    assert y.dtype is torch.float16
    assert rstd.shape == (2, 1, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 24), *shapes(2)])
def test_add_rms_norm_gives_the_new_residual_third(sdk: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x1, x2, gamma = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y, rstd, total = sdk.npu_add_rms_norm(x1.to("npu:0"), x2.to("npu:0"), gamma.to("npu:0"), 1e-5)
    rounded = (x1.double() + x2.double()).to(dtype)
    assert torch.equal(total.cpu(), rounded)
    close(y, normed(rounded, gamma, 1e-5))
    assert rstd.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((3, 12), -1), ((2, 4, 6), 1), ((7, 2), 1), *((shape, -1) for shape in shapes(3, multiple=2))],
)
def test_swiglu_gates_with_the_first_half(sdk: Any, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().split(shape[dim] // 2, dim)
    close(sdk.npu_swiglu(x.to("npu:0"), dim), gate / (1 + (-gate).exp()) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Each pair of elements rotated by its angle, in float64."""
    half = x.shape[-1] // 2
    out = torch.zeros(x.shape, dtype=torch.float64)
    cos, sin, x = cos.double().expand(x.shape), sin.double().expand(x.shape), x.double()
    for i in range(half):
        a, b = (i, i + half) if mode == "half" else (2 * i, 2 * i + 1)
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("mode", "shape", "angles"),
    [
        ("half", (2, 5, 3, 64), (2, 5, 1, 64)),
        ("half", (2, 5, 3, 8), (1, 5, 1, 8)),
        ("half", (2, 3, 5, 128), (1, 1, 5, 128)),
        ("half", (5, 3, 32), (5, 1, 32)),
        ("half", (1500, 3, 16), (1500, 1, 16)),
        ("half", (1, 1500, 3, 16), (1, 1500, 1, 16)),
        ("interleave", (2, 5, 3, 64), (1, 5, 1, 64)),
        *(("half", (1, 3, *shape[-2:]), (1, 3, 1, shape[-1])) for shape in shapes(4, multiple=2)),
    ],
)
def test_rotary_mul(sdk: Any, dtype: torch.dtype, mode: str, shape: tuple[int, ...], angles: tuple[int, ...]) -> None:
    x, angle = torch.randn(shape).to(dtype), torch.rand(angles) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    actual = sdk.npu_rotary_mul(x.to("npu:0"), cos.to("npu:0"), sin.to("npu:0"), mode)
    close(actual, rotated(x, cos, sin, mode))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_nd_update(sdk: Any, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    pool = (torch.rand(4, 3, 5) * 9).to(dtype)
    target = pool.to("npu:0")
    rows = (torch.rand(2, 3, 5) * 9).to(dtype)
    places = torch.tensor([[3], [0]], dtype=index_dtype)
    assert sdk.npu_scatter_nd_update_(target, places.to("npu:0"), rows.to("npu:0")) is target
    expected = pool.clone()
    expected[3], expected[0] = rows[0], rows[1]
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("shape", shapes(7))
def test_scatter_nd_update_over_random_shapes(sdk: Any, shape: tuple[int, ...]) -> None:
    slots = random.Random(0).sample(range(40), 13)
    expected, rows = torch.randn(40, *shape).half(), torch.randn(13, *shape).half()
    target = expected.to("npu:0")
    places = torch.tensor(slots, dtype=torch.int32)[:, None]
    sdk.npu_scatter_nd_update_(target, places.to("npu:0"), rows.to("npu:0"))
    for slot, row in zip(slots, rows, strict=True):
        expected[slot] = row
    assert torch.equal(target.cpu(), expected)


def test_scatter_nd_update_with_deeper_indices(sdk: Any) -> None:
    target = torch.zeros(4, 3, 5, device="npu:0")
    rows = torch.randn(3, 5)
    places = torch.tensor([[3, 1], [0, 0], [2, 2]])
    sdk.npu_scatter_nd_update_(target, places.to("npu:0"), rows.to("npu:0"))
    expected = torch.zeros(4, 3, 5)
    for (a, b), row in zip(places.tolist(), rows, strict=True):
        expected[a, b] = row
    assert torch.equal(target.cpu(), expected)


def kept(row: list[float], p: float | None, k: int | None) -> set[int]:
    """Indices that pass both filters, from the most likely token down."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if k is not None:
        order = [i for i in order if row[i] >= row[order[k - 1]]]
    if p is None:
        return set(order)
    weights = torch.tensor([row[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    chosen, before = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if before < p or not chosen:
            chosen.add(i)
        before += weight
    return chosen


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_top_k_top_p(sdk: Any, with_k: bool, with_p: bool, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(40) for _ in range(6)]).to(dtype) / 4
    k = torch.tensor([1, 3, 40, 7, 12, 30], dtype=torch.int32)
    # Far from every cumulative probability, so that rounding does not matter.
    p = torch.tensor([0.503, 1.0, 0.11, 0.0, 0.87, 0.97]).to(dtype)
    arguments = (p.to("npu:0") if with_p else None, k.to("npu:0") if with_k else None)
    actual = sdk.npu_top_k_top_p(logits.to("npu:0"), *arguments).cpu()
    for i in range(6):
        expected = kept(logits[i].tolist(), p[i].item() if with_p else None, int(k[i]) if with_k else None)
        assert set(actual[i].isfinite().nonzero().flatten().tolist()) == expected
        assert torch.equal(actual[i][sorted(expected)], logits[i][sorted(expected)])


@pytest.mark.parametrize("seed", range(4))
def test_top_k_top_p_over_random_shapes(sdk: Any, seed: int) -> None:
    chance = random.Random(seed)
    rows, vocab = chance.randint(1, 9), chance.randint(2, 900)
    logits, p = torch.randn(rows, vocab) * 3, torch.rand(rows)
    k = torch.tensor([chance.randint(1, vocab) for _ in range(rows)], dtype=torch.int32)
    actual = sdk.npu_top_k_top_p(*(tensor.to("npu:0") for tensor in (logits, p, k))).cpu()
    for i in range(rows):
        expected = kept(logits[i].tolist(), p[i].item(), int(k[i]))
        assert set(actual[i].isfinite().nonzero().flatten().tolist()) == expected


def test_top_k_keeps_logits_equal_to_the_last_one(sdk: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    actual = sdk.npu_top_k_top_p(logits.to("npu:0"), k=torch.tensor([1], dtype=torch.int32).to("npu:0"))
    assert actual.cpu().isfinite().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 7), *((2, *shape) for shape in shapes(5))])
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(sdk: Any, dtype: torch.dtype, shape: tuple[int, ...], smooth: bool) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    x[0] = 0
    factors = (torch.rand(shape[-1]) + 0.5).to(dtype)
    actual, scale = sdk.npu_dynamic_quant(x.to("npu:0"), smooth_scales=factors.to("npu:0") if smooth else None)
    wide = x.double() * (factors.double() if smooth else 1)
    assert actual.dtype is torch.int8
    assert scale.shape == shape[:-1]
    torch.testing.assert_close(scale.cpu().double(), wide.abs().amax(-1) / 127, atol=1e-6, rtol=1e-6)
    error = (actual.cpu().double() * scale.cpu().double()[..., None] - wide).abs()
    assert bool((error <= scale.cpu().double()[..., None] * 0.501).all())
    assert actual.cpu()[1:].double().abs().amax() == 127


def test_quantize_multiplies_and_saturates(sdk: Any) -> None:
    x = torch.tensor([[0.0, 1.0, -2.5, 100.0, -100.0]]).half()
    scales, offset = torch.tensor([2.0]).half(), torch.tensor([3.0]).half()
    actual = sdk.npu_quantize(x.to("npu:0"), scales.to("npu:0"), offset.to("npu:0"), torch.qint8, -1, False)
    assert actual.dtype is torch.int8
    assert actual.cpu().tolist() == [[3, 5, -2, 127, -128]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes(8))
def test_quantize_over_random_shapes(sdk: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, scales = (torch.randn(shape) * 9).to(dtype), (torch.rand(shape[-1]) * 6).to(dtype)
    offset = (torch.randn(shape[-1]) * 20).to(dtype)
    operands = (operand.to("npu:0") for operand in (x, scales, offset))
    actual = sdk.npu_quantize(*operands, torch.qint8, -1, False).cpu().double()
    wide = (x.double() * scales.double() + offset.double()).clamp(-128, 127)
    assert bool(((actual - wide).abs() <= 0.501).all())


def test_quantization_accepts_strides_and_returns_contiguous_tensors(sdk: Any) -> None:
    x = torch.randn(16, 4).half().to("npu:0").t()
    one = torch.ones(1).half().to("npu:0")
    for actual in (sdk.npu_dynamic_quant(x)[0], sdk.npu_quantize(x, one, one, torch.qint8, -1, False)):
        assert tuple(actual.shape) == (4, 16)
        assert actual.is_contiguous()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((5, 40), 24), ((2, 3, 2500), 7), ((1, 16), 32), *((shape, shape[0] * 5) for shape in shapes(6))],
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.float32])
def test_quant_matmul_with_a_scale_for_each_row(
    sdk: Any, dtype: torch.dtype, shape: tuple[int, ...], columns: int, transposed: bool, bias_dtype: Any
) -> None:
    x1 = torch.randint(-128, 128, shape, dtype=torch.int8)
    x2 = torch.randint(-128, 128, (shape[-1], columns), dtype=torch.int8)
    scale, rows = torch.rand(columns) / 1000, x1.numel() // shape[-1]
    pertoken = torch.rand(rows) / 100
    bias = None if bias_dtype is None else (torch.rand(columns) * 9).to(bias_dtype)
    weights = x2.t().contiguous().to("npu:0").t() if transposed else x2.to("npu:0")
    actual = sdk.npu_quant_matmul(
        x1.to("npu:0"),
        weights,
        scale.to("npu:0"),
        pertoken_scale=pertoken.to("npu:0"),
        bias=None if bias is None else bias.to("npu:0"),
        output_dtype=dtype,
    )
    total = x1.double().reshape(rows, -1) @ x2.double()
    early = bias.double() if bias_dtype is torch.int32 else 0
    late = bias.double() if bias_dtype is torch.float32 else 0
    expected = (total + early) * scale.double() * pertoken.double()[:, None] + late
    assert actual.dtype is dtype
    close(actual, expected.reshape(*shape[:-1], columns))


@pytest.mark.parametrize("as_bits", [False, True])
def test_quant_matmul_with_a_fixed_scale(sdk: Any, as_bits: bool) -> None:
    x1 = torch.randint(-128, 128, (4, 32), dtype=torch.int8)
    x2 = torch.randint(-128, 128, (32, 8), dtype=torch.int8)
    scale, bias = torch.rand(8) / 1000, torch.randint(-99, 99, (8,), dtype=torch.int32)
    factors = scale.view(torch.int32).long() if as_bits else scale
    actual = sdk.npu_quant_matmul(
        x1.to("npu:0"), x2.to("npu:0"), factors.to("npu:0"), bias=bias.to("npu:0"), output_dtype=torch.float16
    )
    close(actual, (x1.double() @ x2.double() + bias) * scale.double())


@pytest.mark.parametrize("dtype", [*HALVES, torch.int8])
def test_format_cast_keeps_the_values(sdk: Any, dtype: torch.dtype) -> None:
    weight = (torch.rand(64, 32) * 50).to(dtype)
    on_card = weight.to("npu:0")
    sdk.npu.config.allow_internal_format = True
    try:
        cast = sdk.npu_format_cast(on_card, 29)
    finally:
        sdk.npu.config.allow_internal_format = False
    assert sdk.get_npu_format(on_card) == 2
    assert sdk.get_npu_format(cast) == 29
    assert sdk.get_npu_format(sdk.npu_format_cast(cast, 2)) == 2
    assert torch.equal(cast.cpu(), weight)


def test_format_cast_does_nothing_but_warn_while_internal_formats_are_off(sdk: Any) -> None:
    weight = torch.zeros(32, 32, dtype=torch.float16, device="npu:0")
    with pytest.warns(UserWarning, match="allow_internal_format is False"):
        cast = sdk.npu_format_cast(weight, 29)
    assert sdk.get_npu_format(cast) == 2


def test_operators_are_at_torch_ops_too(sdk: Any) -> None:
    x, gamma = torch.randn(2, 8).half().to("npu:0"), torch.ones(8).half().to("npu:0")
    assert torch.equal(torch.ops.npu.npu_rms_norm(x, gamma)[0].cpu(), sdk.npu_rms_norm(x, gamma)[0].cpu())


def test_operators_work_in_inference_mode(sdk: Any) -> None:
    with torch.inference_mode():
        x, gamma = torch.randn(2, 8).half().to("npu:0"), torch.ones(8).half().to("npu:0")
        y, _ = sdk.npu_rms_norm(x, gamma)
        assert y.is_inference()
        assert bool((y + y).cpu().isfinite().all())
