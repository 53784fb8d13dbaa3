"""What native layers say of themselves before they are built, and the bytes of quantized ones. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator

from srv.dtypes import item_size
from srv.models import derive
from srv.models.architectures.weight_rules import fused_layer_ops, fused_tensor_bytes
from srv.models.blueprint import MoE, Part, walk
from srv.models.derive import ExpertMatrices, ModelOps
from srv.models.layers.moe_config import expert_names
from srv.quantization.method import HeldMatrix, LayerOps, QuantMethod, StoredModel, TensorBytes
from srv.specs import ModelFacts

_FLOAT32_BYTES = 4
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def quantized_bytes(model: ModelFacts, tree: Part, method: QuantMethod, dtype: str) -> int | None:
    """Bytes of the weights that a method quantizes at load, with their scales, and of all others in `dtype`.

    None if the method does not say which these are.
    """
    if method.matrix_bytes is None or method.layer_ops is None:
        return None
    ops = derive.model_ops(tree, dtype)
    layer_op, item = fused_layer_ops(method.layer_ops, method, StoredModel(model, {})), item_size(dtype)
    found = (each for each in ops.matrices if layer_op(each.names, each.inputs, each.embedding))
    shapes = [(each.outputs, each.inputs) for each in found]
    shapes += [shape for each in ops.experts if _is_quantized(each, layer_op) for shape in expert_shapes(each)]
    weights = sum(outputs * inputs for outputs, inputs in shapes)
    mixtures = (part for _, part in walk(tree) if isinstance(part, MoE))
    biases = sum(moe.choice_bias.elements for moe in mixtures if moe.choice_bias is not None)  # float32 in layers
    others = (model.counted_parameters() - weights - biases) * item + biases * _FLOAT32_BYTES
    return others + sum(method.matrix_bytes(outputs, inputs) for outputs, inputs in shapes)


def layer_tensors(
    model: ModelFacts, tree: Part, method: QuantMethod | None, stored: StoredModel, dtype: str
) -> tuple[tuple[int, ...], ...] | str:
    """The bytes of each tensor of the matrices of each layer (`OpLayer.weight_tensors`), without routers.

    A clause if the method does not say them before layers are built. Raises ModelError for damaged files.
    """
    sizes = _plain_sizes(item_size(dtype)) if method is None else _held_sizes(method, stored, item_size(dtype))
    if sizes is None:
        assert method is not None
        return f"{method.name} does not say the bytes of its tensors before layers are built (tensor_bytes)"
    found: dict[int, tuple[int, ...]] = dict.fromkeys(range(model.layers), ())
    for matrix in _held_matrices(derive.model_ops(tree, dtype)):
        if (layer := _LAYER.match(matrix.names[0])) is not None:
            found[int(layer[1])] += sizes(matrix)
    return tuple(found.values())


def _held_matrices(ops: ModelOps) -> Iterator[HeldMatrix]:
    """All matrices that are not a router's."""
    for matrix in ops.matrices:
        if not matrix.role:
            yield HeldMatrix(matrix.names, matrix.output_sizes, matrix.inputs)
    for experts in ops.experts:
        hidden, inner = experts.sizes["hidden"], experts.sizes["intermediate"]
        gate_up, down = expert_names(experts.prefix, experts.sizes["experts"])
        yield HeldMatrix(gate_up, (inner,) * len(gate_up), hidden, experts=True)
        yield HeldMatrix(down, (hidden,) * len(down), inner, experts=True)


def _plain_sizes(item: int) -> TensorBytes:
    return lambda matrix: (sum(matrix.outputs) * matrix.inputs * item,)


def _held_sizes(method: QuantMethod, stored: StoredModel, item: int) -> TensorBytes | None:
    """Of matrices that a method quantizes, or leaves as they are; None if it does not say them."""
    if method.layer_ops is None or method.tensor_bytes is None:
        return None
    layer_op, plain = fused_layer_ops(method.layer_ops, method, stored), _plain_sizes(item)
    held = fused_tensor_bytes(method.tensor_bytes, method, stored)
    return lambda matrix: (held if layer_op(matrix.names, matrix.inputs, False) else plain)(matrix)


def _is_quantized(experts: ExpertMatrices, layer_op: LayerOps) -> bool:
    gate_up, _ = expert_names(experts.prefix, 1)
    return bool(layer_op(gate_up, experts.sizes["hidden"], False))


def expert_shapes(experts: ExpertMatrices) -> list[tuple[int, int]]:
    """(outputs, inputs) of the projections of all experts: each product has the matrices of all as rows."""
    sizes = experts.sizes
    count, hidden, inner = sizes["experts"], sizes["hidden"], sizes["intermediate"]
    return [(count * 2 * inner, hidden), (count * hidden, inner)]
