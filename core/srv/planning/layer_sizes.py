"""What native layers say of themselves before they are built, and the bytes of quantized ones. Torch-free."""

from __future__ import annotations

from srv.dtypes import item_size
from srv.models.architectures.architecture import DECODER, NativeConfig
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.expert_layers import mixture_of
from srv.models.architectures.op_uses import DescribesOps, ExpertMatrices, ModelOps
from srv.models.architectures.own_order import stored_layer_ops
from srv.models.architectures.registry import find
from srv.models.layers.moe_config import expert_names
from srv.quantization.method import LayerOps, QuantMethod, StoredModel
from srv.specs import ModelFacts

_FLOAT32_BYTES = 4


def described_ops(model: ModelFacts, config: NativeConfig, dtype: str) -> ModelOps | None:
    """What the layers call; None if only they know: layers of another class do not call what shared ones do."""
    architecture = find(model.architecture)
    shared = architecture is not None and architecture.layers == DECODER
    kind = type(config)
    own = "model_ops" in vars(kind) and kind is not DecoderConfig
    return config.model_ops(dtype) if isinstance(config, DescribesOps) and (shared or own) else None


def quantized_bytes(model: ModelFacts, config: NativeConfig, method: QuantMethod, dtype: str) -> int | None:
    """Bytes of the weights that a method quantizes at load, with their scales, and of all others in `dtype`.

    None if the method, or the layers, do not say which these are.
    """
    ops = described_ops(model, config, dtype)
    if ops is None or method.matrix_bytes is None or method.layer_ops is None:
        return None
    layer_op, item = stored_layer_ops(method.layer_ops, method, StoredModel(model, {})), item_size(dtype)
    found = (each for each in ops.matrices if layer_op(each.names, each.inputs, each.embedding))
    shapes = [(each.outputs, each.inputs) for each in found]
    shapes += [shape for each in ops.experts if _is_quantized(each, layer_op) for shape in expert_shapes(each)]
    weights = sum(outputs * inputs for outputs, inputs in shapes)
    moe = mixture_of(config)
    biases = len(ops.experts) * moe.experts if moe is not None and moe.routing.bias else 0  # float32 in layers
    others = (model.counted_parameters() - weights - biases) * item + biases * _FLOAT32_BYTES
    return others + sum(method.matrix_bytes(outputs, inputs) for outputs, inputs in shapes)


def _is_quantized(experts: ExpertMatrices, layer_op: LayerOps) -> bool:
    gate_up, _ = expert_names(experts.prefix, 1)
    return bool(layer_op(gate_up, experts.sizes["hidden"], False))


def expert_shapes(experts: ExpertMatrices) -> list[tuple[int, int]]:
    """(outputs, inputs) of the projections of all experts: each product has the matrices of all as rows."""
    sizes = experts.sizes
    count, hidden, inner = sizes["experts"], sizes["hidden"], sizes["intermediate"]
    return [(count * 2 * inner, hidden), (count * hidden, inner)]
