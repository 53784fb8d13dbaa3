"""The ops that the CPU platform binds on this processor satisfy their contracts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from srv.models.checkpoints.dummy import load_dummy
from srv.models.checkpoints.gguf_types import OP_TYPES, TENSOR_TYPES
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LocalSizes
from srv.models.layers.linear import Projection
from srv.platform.interface import OpArgs, Platform
from srv.platform.ops import Ops
from srv.quantization.formats.gguf import schemes
from srv.quantization.layers.blocks import GGUFEmbedding, OrderedLinear, empty_matrix
from srv.quantization.layers.factory import SchemeLayers
from srv.quantization.layers.int8 import DynamicInt8Linear, ScaledInt8Linear, StaticInt8Linear, WeightOnlyInt8Linear
from srv.quantization.method import StoredModel
from srv.quantization.schemes import prepared_bytes
from srv.testing.conformance.facts import small_model
from srv_kernels.cases import random_gguf_rows
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

EXPERT_SIZES = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2}
STATE_SIZES = {"channels": 96, "width": 4, "key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}
CAPABILITIES = ("gguf_codebooks",)
SCAN_SIZES = {"heads": 6, "groups": 2, "state_size": 16}
SIZES = {"dim": 576, "head_dim": 64, "rotary_dim": 64, "inputs": 576, "outputs": 576, **EXPERT_SIZES}
SIZES |= STATE_SIZES | SCAN_SIZES
CASES = [
    pytest.param(
        op,
        dtype,
        marks=covers(f"op:{op}/{str(dtype).removeprefix('torch.')}", platform="cpu"),
        id=f"{op}-{str(dtype)[6:]}",
    )
    for op, contract in CONTRACTS.items()
    for dtype in contract.dtypes
]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_op_that_is_bound_here_keeps_its_contract(op: str, dtype: torch.dtype, platform: Platform) -> None:
    contract = CONTRACTS[op]
    bound = Ops("cpu", platform.ops).bind(op, OpArgs(dtype, {name: SIZES[name] for name in contract.sizes}))
    with torch.inference_mode():
        assert violations(contract, bound, dtype, capabilities=CAPABILITIES) == []


@pytest.mark.skipif(load().library is None, reason=f"no native kernels to repack for: {load().reason}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_layers_give_the_same_after_repacking_and_a_tied_embedding_is_packed_once(
    dtype: torch.dtype, platform: Platform
) -> None:
    context = BuildContext(torch.device("cpu"), dtype, Ops("cpu", platform.ops))
    types = {"a.weight": "Q4_1", "b.weight": "Q8_0", "table.weight": "Q8_0"}
    weights = SchemeLayers(context, schemes(StoredModel(small_model("float32"), types)))
    linear = weights.linear({"a": 40, "b": 17}, 64, True)
    table = weights.embedding("table", 70, 64)
    tied = weights.tied_lm_head("head", table)
    generator = torch.Generator().manual_seed(2)
    for target in (linear.weight_views() | table.weight_views()).values():
        if target.dtype == torch.uint8:
            target.copy_(torch.randint(0, 60, target.shape, generator=generator, dtype=torch.uint8))
        else:
            target.normal_(generator=generator)
    x, tokens = torch.randn(5, 64, generator=generator).to(dtype), torch.tensor([0, 69, 32, 32])
    with torch.inference_mode():
        before = linear(x), table(tokens), tied(x)
        platform.post_load(torch.nn.ModuleList([linear, table, tied]))
        after = linear(x), table(tokens), tied(x)
    assert isinstance(table, GGUFEmbedding)
    assert table.matrix.rows.numel() == 0
    for old, new in zip(before, after, strict=True):
        assert float((new - old).abs().max()) <= 0.02 * float(old.abs().max())


@pytest.mark.skipif(load().library is None, reason=f"no native kernels that are captured: {load().reason}")
def test_a_captured_product_takes_inputs_in_another_order_itself(platform: Platform) -> None:
    """Without a gather by torch between the native calls of a step."""
    from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool

    context = BuildContext(torch.device("cpu"), torch.float32, Ops("cpu", platform.ops))
    matrix = empty_matrix(context, 57, 64, "Q4_0")
    matrix.rows.copy_(random_gguf_rows(torch.Generator().manual_seed(1), 57, 64, "Q4_0"))
    linear = OrderedLinear(context, {"a": 40, "b": 17}, [matrix], bias=True)
    views = linear.weight_views()
    for name in ("a", "b"):
        views[f"{name}.columns"].copy_(torch.randperm(64, generator=torch.Generator().manual_seed(2)))
        views[f"{name}.bias"].fill_(3)
    assert linear.validate_loaded() is None
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        before = linear(x)
        platform.post_load(torch.nn.ModuleList([linear]))
        with CapturedGraph(GraphMemoryPool()) as graph:
            after = linear(x)
        graph.replay()
    assert (graph.native_calls, graph.torch_calls) == (1, 0)
    assert float((after - before).abs().max()) <= 0.02 * float(before.abs().max())


@pytest.mark.parametrize("kind", [DynamicInt8Linear, WeightOnlyInt8Linear, StaticInt8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bit_layers_give_the_same_after_repacking(
    kind: type[ScaledInt8Linear | StaticInt8Linear], dtype: torch.dtype, platform: Platform
) -> None:
    """The unpacked weight is released, except in float16, which the native kernels do not support."""
    context = BuildContext(torch.device("cpu"), dtype, Ops("cpu", platform.ops))
    further = {} if kind is StaticInt8Linear else {"bias": True}
    linear = kind(context, LocalSizes({"first": 40, "second": 17}, 33), **further)
    load_dummy(linear.weight_views(), seed=2)
    assert linear.validate_loaded() is None
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        before = linear(x)
        platform.post_load(torch.nn.ModuleList([linear]))
        after = linear(x)
    repacked = load().library is not None and dtype != torch.float16
    assert (linear.weight.numel() == 0) is repacked
    torch.testing.assert_close(after, before, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


class OwnLinear(Projection):
    """A layer of a third party's method: it calls an op of srv, on tensors with names of its own."""

    op = "linear_int8"

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context.dtype, {"own": 40}, 33)
        self.integers = context.empty(40, 33, dtype=torch.int8)
        self.scales = context.empty(40, dtype=torch.float32)
        multiply = context.bind(self.op, inputs=33, outputs=40)
        self.kernel = lambda x: multiply(x, *self.operands()[0].values())

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ({"weight": self.integers, "weight_scale": self.scales, "bias": None},)

    def weight_views(self) -> dict[str, torch.Tensor]:
        return {"own.weight": self.integers, "own.weight_scale": self.scales}


@pytest.mark.skipif(load().library is None, reason=f"no native kernels to repack for: {load().reason}")
def test_a_layer_gets_the_kernel_of_its_op_whatever_its_class(platform: Platform) -> None:
    linear = OwnLinear(BuildContext(torch.device("cpu"), torch.float32, Ops("cpu", platform.ops)))
    load_dummy(linear.weight_views(), seed=2)
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = linear(x)
        platform.post_load(torch.nn.ModuleList([linear]))
        assert type(linear.kernel).__name__ == "Int8WeightLinear"
        torch.testing.assert_close(linear(x), before)
    assert linear.integers.numel() == 0


@pytest.mark.skipif(load().library is None, reason=f"no native kernels that pack: {load().reason}")
def test_packed_gguf_weights_take_no_more_than_plans_assume() -> None:
    from srv_kernels.cpu.native_linear import GGML_TYPES, LIBRARY

    outputs, inputs = 512, 1024
    weights = outputs * inputs
    stored = {kind.name: kind.size * weights // kind.elements for kind in TENSOR_TYPES.values()}
    for name in OP_TYPES:
        packed = LIBRARY.srv_packed_gguf_bytes(GGML_TYPES[name], outputs, inputs)
        assert max(packed, stored[name]) <= prepared_bytes(name, weights), name
