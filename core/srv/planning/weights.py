"""The weights of a model as its layers hold them: the scheme of each matrix, and the bytes of all. Torch-free.

Everything is a walk over the tree of a model, with the scheme that the method of the weights names for each matrix
(`srv.quantization.schemes`): budgets, layers in host memory and kernel plans ask here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from srv.args.config import Config
from srv.dtypes import item_size
from srv.errors import ModelError, Refusal, Rejection
from srv.kept import kept_per_object
from srv.models import derive
from srv.models.blueprint import Experts, MoE, Part, walk
from srv.models.checkpoints.gguf_types import OP_TYPES
from srv.models.checkpoints.text_names import needed_tensors
from srv.models.facts.checkpoint_tensors import quantized_layers, split_name, text_tensors
from srv.models.facts.weight_rules import fused_mapping, layer_schemes
from srv.models.families.trees import native_tree_of_model
from srv.models.layers.moe_config import expert_names
from srv.quantization.method import QuantMethod, StoredModel, shape_of_bytes
from srv.quantization.registry import chosen, dequantizes
from srv.quantization.schemes import LayerSchemes, Matrix, Scheme, prepared_bytes, row_bytes
from srv.specs import ModelFacts

UNKNOWN_SIZE = "unknown_size"  # the code of a refusal
_FLOAT32_BYTES = 4
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class HeldMatrix(NamedTuple):
    """A matrix of the layers of a model. `scheme`: None for unquantized weights.

    `bias`: the elements of its bias that `scheme` holds within its own tensors, 0 otherwise. `router`: it has a role of
    its own, and stays on the device.
    """

    matrix: Matrix
    scheme: Scheme | None
    bias: int = 0
    router: bool = False


class WeightBytes(NamedTuple):
    """Bytes of the weights of a model: as they are loaded, and at most after a platform has repacked them."""

    loaded: int
    prepared: int


def quantization_method(config: Config, model: ModelFacts) -> QuantMethod | None:
    """The method by which the layers of a model will hold its weights; None if these are not quantized."""
    weights = config.weights
    dequantize = dequantizes(model, weights.dequantize_weights, config.model.load_format)
    if model.format == "gguf":
        dequantize = dequantize or config.model.model_impl == "transformers" or native_of(model) is None
    return chosen(model, weights.quantization, weights.torchao_config, dequantize=dequantize)


def native_of(model: ModelFacts) -> Part | None:
    """The blueprint of the native layers; None if they do not support the model."""
    native = native_tree_of_model(model)
    return None if isinstance(native, str) else native


def types_are_known(model: ModelFacts) -> bool:
    """Whether the types of single tensors are known: those of a GGUF file are in the file alone."""
    return model.format != "gguf" or Path(model.path).is_file()


def schemes_of_rank(tree: Part, schemes: LayerSchemes) -> LayerSchemes:
    """`schemes`, asked with the inputs and the experts that a rank has. `tree`: of the whole model."""
    whole = {matrix.names[0]: (matrix.names, matrix.inputs) for matrix in derive.matrices(tree)}
    for name, part in walk(tree):
        if isinstance(part, Experts):
            gate_up, down = expert_names(name, part.count, part.activation)
            whole |= {gate_up[0]: (gate_up, part.hidden), down[0]: (down, part.inner)}

    def of_rank(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        names, inputs = whole.get(names[0], (names, inputs))
        return schemes(names, inputs, embedding)

    return of_rank


def held_matrices(model: ModelFacts, tree: Part, method: QuantMethod | None) -> Iterator[HeldMatrix]:
    """All matrices of the layers that are made, that of the embedding first; a tied output layer has none.

    Raises ModelError for damaged files.
    """
    schemes, mapping = layer_schemes(model, method), fused_mapping(model, method)
    for matrix in derive.matrices(tree):
        if matrix.tied:
            continue
        names, outputs = matrix.names, matrix.output_sizes
        if mapping is not None and (fused := mapping.fused(names)) != names:
            names, outputs = fused, (sum(outputs),)
        scheme = schemes(names, matrix.inputs, matrix.embedding)
        inside = matrix.bias and scheme is not None and not scheme.has_biases
        yield HeldMatrix(Matrix(names, outputs, matrix.inputs), scheme, sum(outputs) * inside, bool(matrix.role))
    for name, part in walk(tree):
        if isinstance(part, Experts):
            gate_up, down = expert_names(name, part.count, part.activation)
            yield _of_experts(gate_up, part.inner, part.hidden, schemes)
            yield _of_experts(down, part.hidden, part.inner, schemes)


def _of_experts(names: tuple[str, ...], outputs: int, inputs: int, schemes: LayerSchemes) -> HeldMatrix:
    return HeldMatrix(Matrix(names, (outputs,) * len(names), inputs, experts=True), schemes(names, inputs, False))


def weight_sizes(config: Config, model: ModelFacts, method: QuantMethod) -> WeightBytes:
    """The bytes of the weights of a whole model that a method holds.

    A checkpoint that is refused counts as it is stored, and so does one of a method that does not say its schemes.
    Raises Refusal as `as_stored`.
    """
    native, dtype = native_of(model), config.model.dtype
    if method.schemes is None:
        return as_stored(model)
    if native is None or config.model.model_impl == "transformers":
        return class_bytes(model, method, dtype)
    if not types_are_known(model):
        return _by_types(model, item_size(dtype))
    try:
        return _walked(model, method, dtype)
    except ModelError:
        return as_stored(model)


def as_stored(model: ModelFacts) -> WeightBytes:
    """The bytes of the files. Raises Refusal (unknown_size) if the configuration alone does not determine them."""
    if model.unknown_sizes is not None:
        raise Refusal([unknown_size(model)])
    return WeightBytes(model.weight_bytes, model.weight_bytes)


def unknown_size(model: ModelFacts) -> Rejection:
    """The rejection of a model whose weights have no known size."""
    reason = f"its size is not known: {model.unknown_sizes}"
    remedy = "Download the weights, whose files say their exact size."
    return Rejection(UNKNOWN_SIZE, "model", model.architecture, "memory budget", reason, remedy)


@kept_per_object
def class_bytes(model: ModelFacts, method: QuantMethod, dtype: str, *, dequantize: bool = False) -> WeightBytes:
    """Those of a class of transformers, by the headers of the checkpoint; as it is stored where they do not show more.

    `dequantize`: all quantized weights become floats. Raises Refusal as `as_stored`.
    """
    stored = text_tensors(model)
    try:
        schemes = None if dequantize or method.schemes is None else method.schemes(stored)
        counted = [_layer_bytes(stored, method, schemes, layer, item_size(dtype)) for layer in quantized_layers(stored)]
    except ModelError:
        counted = [None]
    if not stored.types or None in counted:
        return as_stored(model)
    sizes = [size for size in counted if size is not None]
    quantized = quantized_layers(stored)
    floats = (name for name in needed_tensors(model) if split_name(name)[0] not in quantized)
    others = sum(prod(stored.shapes[name]) for name in floats) * item_size(dtype)
    return WeightBytes(
        others + sum(size.loaded for size in sizes), others + sum(max(size.loaded, size.prepared) for size in sizes)
    )


def _layer_bytes(
    stored: StoredModel, method: QuantMethod, schemes: LayerSchemes | None, layer: str, item: int
) -> WeightBytes | None:
    """Those of a quantized linear layer in a class of transformers, of which no two are one matrix."""
    shape = (method.matrix_shape or shape_of_bytes)(stored, layer)
    if shape is None:
        return None
    outputs, inputs = shape
    scheme = None if schemes is None or method.makes_floats(layer) else schemes((layer,), inputs, False)
    bias = prod(stored.shapes[f"{layer}.bias"]) * item if f"{layer}.bias" in stored.types else 0
    if scheme is None:
        return WeightBytes(outputs * inputs * item + bias, outputs * inputs * item + bias)
    matrix, bias = Matrix((layer,), (outputs,), inputs), bias * scheme.has_biases
    return WeightBytes(scheme.bytes(matrix) + bias, scheme.prepared_bytes(matrix) + bias)


@kept_per_object
def _walked(model: ModelFacts, method: QuantMethod, dtype: str) -> WeightBytes:
    tree = native_of(model)
    assert tree is not None
    matrices = held_matrices(model, tree, method)
    quantized = [(matrix.matrix, matrix.scheme, matrix.bias) for matrix in matrices if matrix.scheme is not None]
    mixtures = (part for _, part in walk(tree) if isinstance(part, MoE))
    wide = sum(moe.choice_bias.elements for moe in mixtures if moe.choice_bias is not None)  # float32 in layers
    quantized_elements = sum(sum(matrix.outputs) * matrix.inputs + bias for matrix, _, bias in quantized)
    others = (derive.parameters(tree) - quantized_elements - wide) * item_size(dtype) + wide * _FLOAT32_BYTES
    loaded = sum(scheme.bytes(matrix) for matrix, scheme, _ in quantized)
    prepared = sum(scheme.prepared_bytes(matrix) for matrix, scheme, _ in quantized)
    return WeightBytes(others + loaded, others + max(loaded, prepared))


def _by_types(model: ModelFacts, item: int) -> WeightBytes:
    """Of a GGUF file that is not on this machine, whose blocks stay as they are wherever ops have their type."""
    blocks = {name: count for name, count in model.stored_types.items() if name in OP_TYPES}
    others = (model.counted_parameters() - sum(blocks.values())) * item
    loaded = sum(row_bytes(name, count) for name, count in blocks.items())
    prepared = sum(prepared_bytes(name, count) for name, count in blocks.items())
    return WeightBytes(others + loaded, others + max(loaded, prepared))


def layer_tensors(
    model: ModelFacts, tree: Part, method: QuantMethod | None, dtype: str
) -> tuple[tuple[int, ...], ...] | str:
    """The bytes of each tensor of each layer that host memory may hold (`OpLayer.weight_tensors`).

    A clause if the method does not say them before layers are built. Raises ModelError for damaged files.
    """
    if method is not None and method.schemes is None:
        return f"{method.name} does not say the bytes of its tensors before layers are built (schemes)"
    sizes: dict[int, tuple[int, ...]] = dict.fromkeys(range(model.layers), ())
    for held_matrix in held_matrices(model, tree, method):
        layer = _LAYER.match(held_matrix.matrix.names[0])
        if layer is not None and not held_matrix.router:
            sizes[int(layer[1])] += _sizes(held_matrix, item_size(dtype))
    return tuple(sizes.values())


def _sizes(matrix: HeldMatrix, item: int) -> tuple[int, ...]:
    if matrix.scheme is None:
        return (sum(matrix.matrix.outputs) * matrix.matrix.inputs * item,)
    return tuple(tensor.bytes for tensor in matrix.scheme.tensors(matrix.matrix) if not tensor.resident)
