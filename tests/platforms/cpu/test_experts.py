"""The experts of a layer on the CPU platform: what they compute before and after their weights are repacked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from srv.models.checkpoints.dummy import load_dummy
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.platform.interface import OpImpl, Platform
from srv.platform.ops import Ops
from srv.quantization.layers.blocks import GGUFExperts, OrderedExperts
from srv.quantization.layers.fp8 import Fp8Experts
from srv.quantization.layers.int8 import Int8Experts
from srv.quantization.schemes import Fp8
from srv_kernels.cases import random_fp8, random_gguf_rows
from srv_kernels.cpu.library import load

SIZES = ExpertSizes(experts=6, top_k=2, hidden=64, intermediate=32)
ACTIVATIONS = pytest.mark.parametrize("sizes", [SIZES, SIZES._replace(activation="relu2")], ids=["gated", "ungated"])
NATIVE = load().library is not None


def _before_and_after(
    platform: Platform, layer: ExpertWeights, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a layer before and after the platform's `post_load`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, SIZES.hidden, generator=generator).to(dtype)
    ids = torch.rand(9, SIZES.experts, generator=generator).argsort(-1)[:, : SIZES.top_k].contiguous()
    weights = torch.rand(9, SIZES.top_k, generator=generator)
    with torch.inference_mode():
        before = layer.kernel(x, ids, weights)
        platform.post_load(torch.nn.ModuleList([layer]))
        return before, layer.kernel(x, ids, weights)


def _context(dtype: torch.dtype, ops: Sequence[OpImpl]) -> BuildContext:
    return BuildContext(torch.device("cpu"), dtype, Ops("cpu", tuple(ops)))


def _random(layer: ExpertWeights) -> ExpertWeights:
    load_dummy(layer.weight_views(), seed=2)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@ACTIVATIONS
def test_experts_give_the_same_after_repacking(
    bias: bool, sizes: ExpertSizes, dtype: torch.dtype, platform: Platform
) -> None:
    """The unpacked weights are released, except in float16, which the native kernels do not support."""
    layer = _random(LayerFactory(_context(dtype, platform.ops)).experts("experts", sizes, bias))
    before, after = _before_and_after(platform, layer, dtype)
    repacked = NATIVE and dtype != torch.float16
    assert layer.implementation == ("native" if repacked else "torch_native")
    assert (layer.operands()[0]["gate_up"].numel() == 0) is repacked
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ACTIVATIONS
def test_int8_experts_give_the_same_after_repacking(sizes: ExpertSizes, dtype: torch.dtype, platform: Platform) -> None:
    layer = Int8Experts(_context(dtype, platform.ops), "experts", sizes)
    generator = torch.Generator().manual_seed(3)
    for matrix, scales in ((layer.gate_up, layer.gate_up_scale), (layer.down, layer.down_scale)):
        matrix.random_(-127, 128, generator=generator)
        scales.uniform_(0, 1e-3, generator=generator)
    before, after = _before_and_after(platform, layer, dtype)
    assert (layer.gate_up.numel() == layer.down.numel() == 0) is (NATIVE and dtype != torch.float16)
    assert torch.equal(before, after)
    assert float(after.abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@ACTIVATIONS
def test_fp8_experts_give_the_same_after_repacking(
    bias: bool, sizes: ExpertSizes, dtype: torch.dtype, platform: Platform
) -> None:
    layer = Fp8Experts(_context(dtype, platform.ops), "experts", sizes, Fp8(block=(32, 32)), bias)
    generator = torch.Generator().manual_seed(5)
    for matrix, scales in ((layer.gate_up, layer.gate_up_scale), (layer.down, layer.down_scale)):
        matrix.copy_(random_fp8(generator, *matrix.shape))
        scales.uniform_(0, 1e-2, generator=generator)
    for one in (layer.gate_up_bias, layer.down_bias):
        if one is not None:
            one.normal_(generator=generator)
    before, after = _before_and_after(platform, layer, dtype)
    assert (layer.gate_up.numel() == layer.down.numel() == 0) is NATIVE
    assert torch.equal(before, after)
    assert float(after.abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("types", [("Q4_0", "Q8_0"), ("Q8_0", "Q5_1")])
@ACTIVATIONS
def test_experts_of_a_gguf_file_give_the_same_after_repacking(
    types: tuple[str, str], sizes: ExpertSizes, dtype: torch.dtype, platform: Platform
) -> None:
    layer = GGUFExperts(_context(dtype, platform.ops), "experts", sizes, *types)
    generator = torch.Generator().manual_seed(4)
    for rows, inputs, stored in ((layer.gate_up, SIZES.hidden, types[0]), (layer.down, SIZES.intermediate, types[1])):
        rows.copy_(random_gguf_rows(generator, rows.shape[0] * rows.shape[1], inputs, stored).view(rows.shape))
    before, after = _before_and_after(platform, layer, dtype)
    assert (layer.gate_up.numel() == layer.down.numel() == 0) is NATIVE
    assert torch.equal(before, after)
    assert float(after.abs().max()) > 0


@pytest.mark.parametrize("shared", [False, True])
@ACTIVATIONS
def test_experts_with_ordered_inputs_give_the_same_after_repacking(
    shared: bool, sizes: ExpertSizes, platform: Platform
) -> None:
    generator = torch.Generator().manual_seed(6)
    inner = GGUFExperts(_context(torch.float32, platform.ops), "experts", sizes, "Q8_0", "Q8_0")
    for rows, inputs in ((inner.gate_up, SIZES.hidden), (inner.down, SIZES.intermediate)):
        rows.copy_(random_gguf_rows(generator, rows.shape[0] * rows.shape[1], inputs, "Q8_0").view(rows.shape))
    layer = OrderedExperts(_context(torch.float32, platform.ops), inner)
    orders = torch.rand(1 if shared else SIZES.experts, 1, SIZES.hidden, generator=generator).argsort(-1)
    layer.gate_up_columns.copy_(orders.expand_as(layer.gate_up_columns))
    layer.down_columns.copy_(torch.rand(layer.down_columns.shape, generator=generator).argsort(-1))
    assert layer.validate_loaded() is None
    before, after = _before_and_after(platform, layer, torch.float32)
    assert (inner.gate_up.numel() == inner.down.numel() == 0) is NATIVE
    assert torch.equal(before, after)
    assert float(after.abs().max()) > 0


@pytest.mark.skipif(not NATIVE, reason=f"no native kernels to repack for: {load().reason}")
def test_experts_of_which_another_implementation_was_chosen_are_not_repacked(platform: Platform) -> None:
    others = [impl for impl in platform.ops if impl.name != "native"]
    layer = _random(LayerFactory(_context(torch.float32, others)).experts("experts", SIZES))
    before, after = _before_and_after(platform, layer, torch.float32)
    assert layer.operands()[0]["gate_up"].numel() > 0
    assert torch.equal(before, after)
