"""What platforms see of layers: the op that a layer calls, with the arguments of the op's contract."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from every import every
from models_reference_ops import reference_ops
from models_small import HOST
from torch import Tensor, nn

from srv.errors import InternalError, ModelError
from srv.models.checkpoints.dummy import load_dummy
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes
from srv.models.layers.factory import LayerFactory, LocalSizes
from srv.models.layers.linear import Projection
from srv.models.layers.op_layer import OpLayer, op_layers
from srv.quantization.layers.factory import SchemeLayers
from srv.quantization.layers.fp8 import Fp8Linear
from srv.quantization.layers.int8 import DynamicInt8Linear, StaticInt8Linear, WeightOnlyInt8Linear
from srv.quantization.registry import BUILT_IN, find
from srv.quantization.schemes import Blocks, Fp8, HeldTensor, Matrix, Scheme
from srv_kernels.contracts import CONTRACTS

CONTEXT = BuildContext(HOST, torch.float32, reference_ops())
SHARDS = {"first": 40, "second": 24}
GGUF = SchemeLayers(CONTEXT, lambda names, inputs, embedding: Blocks(("Q8_0",)))


def filled(layer: Any) -> Any:
    load_dummy(layer.weight_views(), seed=1)
    for operand in layer.operands():
        if "rows" in operand:  # blocks of Q8_0: a float16 scale of 1, then integers
            operand["rows"].view(operand["rows"].shape[0], -1, 34)[..., :2] = torch.tensor([0, 60], dtype=torch.uint8)
    return layer


LINEAR: list[Callable[[], Any]] = [
    lambda: DynamicInt8Linear(CONTEXT, LocalSizes(SHARDS, 32), bias=True),
    lambda: WeightOnlyInt8Linear(CONTEXT, LocalSizes(SHARDS, 32), bias=False),
    lambda: StaticInt8Linear(CONTEXT, LocalSizes(SHARDS, 32)),
    lambda: GGUF.linear(SHARDS, 32, bias=True),
    lambda: Fp8Linear(CONTEXT, LocalSizes(SHARDS, 32), True, Fp8()),
    lambda: Fp8Linear(CONTEXT, LocalSizes(SHARDS, 32), True, Fp8((16, 32))),
]


@every("make", LINEAR)
def test_a_layer_computes_its_op_on_its_operands(make: Callable[[], Any]) -> None:
    layer = filled(make())
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    op: Callable[..., Tensor] = CONTEXT.bind(layer.op)
    product = torch.cat([op(x, *operands.values()) for operands in layer.operands()], -1)
    expected = product if layer.added_bias is None else product + layer.added_bias
    assert torch.equal(layer(x), expected)
    assert (layer.inputs, layer.dtype, layer.tied) == (32, torch.float32, False)
    assert expected.any()


@every("make", [*LINEAR, lambda: GGUF.embedding("table", 30, 32)])
def test_operands_have_the_names_and_the_order_of_the_contract(make: Callable[[], Any]) -> None:
    layer = make()
    reference = pkgutil.resolve_name(CONTRACTS[layer.op].reference)
    names = [name for name in inspect.signature(reference).parameters if name not in ("x", "indices", "dtype")]
    assert [list(operands) for operands in layer.operands()] == [names] * len(layer.operands())


def test_the_ops_of_a_method_have_contracts() -> None:
    methods = [find(name) for name in BUILT_IN]
    assert [(method.name, op) for method in methods if method for op in method.ops if op not in CONTRACTS] == []


@pytest.mark.parametrize("factory", [LayerFactory(CONTEXT), GGUF], ids=["plain", "gguf"])
def test_a_tied_layer_has_the_matrix_of_the_embedding_and_sees_its_release(factory: LayerFactory) -> None:
    embedding = factory.embedding("table", 30, 32)
    head = factory.tied_lm_head("head", embedding)
    layers: list[OpLayer] = list(op_layers(nn.ModuleList([embedding, head])))
    assert layers == [embedding, head]
    first, second = (next(iter(layer.operands()[0].values())) for layer in layers)
    assert first is second
    assert (embedding.tied, head.tied) == (False, True)
    embedding.release()
    assert next(iter(head.operands()[0].values())).shape == (0, *first.shape[1:])


@dataclass(frozen=True)
class Halves(Scheme):
    """A scheme that no class of srv knows."""

    op = ""

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        return (HeldTensor("weight", (sum(matrix.outputs), matrix.inputs), "float16"),)


class HalvesLayers(SchemeLayers):
    def other_linear(self, scheme: Scheme, local: LocalSizes, bias: bool) -> Projection:
        return LayerFactory(replace(self.context, dtype=torch.float16)).linear(local.output_sizes, local.inputs, bias)


def test_a_factory_adds_the_layers_of_a_scheme_of_its_own() -> None:
    layers = HalvesLayers(CONTEXT, lambda names, inputs, embedding: Halves())
    assert layers.linear(SHARDS, 32, bias=False).dtype is torch.float16
    with pytest.raises(ModelError, match="are held as Halves"):
        layers.experts("mlp.experts", ExpertSizes(experts=4, top_k=2, hidden=32, intermediate=16))
    with pytest.raises(InternalError, match="has no layers in srv"):
        SchemeLayers(CONTEXT, lambda names, inputs, embedding: Halves()).linear(SHARDS, 32, bias=False)
