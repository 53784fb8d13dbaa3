"""Weights that a checkpoint fuses, or whose rows it orders otherwise than the layers: what quantized ones need.

Torch-free: a plan asks the same before there is a device. Must not know how a method stores weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.architectures.architecture import NativeConfig
from srv.models.architectures.registry import find, with_defaults
from srv.models.formats.rotary_rows import crossing_rows, with_gates
from srv.models.formats.row_orders import block_order, row_orders
from srv.models.formats.stored_weights import StoredWeights
from srv.models.formats.text_names import needed_tensors
from srv.quantization.method import UP_PROJECTION, QuantMethod
from srv.quantization.schemes import LayerSchemes
from srv.specs import AttentionLayer, ModelFacts

_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(_?)(gate_up_proj|down_proj)")  # of all experts of a layer in one tensor
_EXPERT = ".experts."


def own_order(facts: ModelFacts) -> StoredWeights | None:
    """How safetensors files of the architecture fuse weights, or order their rows otherwise than the layers."""
    if facts.format == "gguf":
        return None
    architecture = find(facts.architecture)
    weights = None if architecture is None else architecture.weights
    return weights if weights is not None and weights.in_own_order else None


def kept_whole(facts: ModelFacts, method: QuantMethod | None) -> StoredWeights | None:
    """As `own_order`, for quantized checkpoints, whose fused matrices stay whole; None for all others."""
    return None if method is None or method.online else own_order(facts)


def interleaved_dims(facts: ModelFacts, weights: StoredWeights) -> int:
    """The dimensions per head whose rotary pairs are adjacent in the files of a model; 0 for none."""
    fields = with_defaults(facts.architecture, facts.config)
    return 0 if weights.interleaved is None else weights.interleaved(fields)


def stored_attention(config: NativeConfig, weights: StoredWeights) -> tuple[AttentionLayer, ...]:
    """The attention layers as checkpoints have their rows."""
    return tuple(map(with_gates, config.attention_layers) if weights.gated_queries else config.attention_layers)


def stored_schemes(schemes: LayerSchemes, weights: StoredWeights | None) -> LayerSchemes:
    """`schemes`, which has the names of matrices as they are stored, by the names that the model has for layers.

    `weights`: of `kept_whole`.
    """
    if weights is None:
        return schemes
    return lambda names, inputs, embedding: schemes(weights.whole(names), inputs, embedding)


def has_quantized_experts(facts: ModelFacts) -> bool:
    """Whether a mixture of experts is quantized: its tensors say so; without weights, all are taken for quantized."""
    tensors = needed_tensors(facts)
    return not tensors or any(_EXPERT in name and each.dtype not in FLOATS for name, each in tensors.items())


def check_order(facts: ModelFacts, config: NativeConfig, method: QuantMethod, ranks: int = 1) -> None:
    """Refuse quantized weights that the layers can hold neither as they are stored nor in the order of the layers.

    Raises ModelError (unsupported_quantization).
    """
    if not method.online and not method.up_projections:
        _check_up_projections(facts, method)
    weights = kept_whole(facts, method)
    if weights is None:
        return
    named = ((weights.model_name(stored), tensor.dtype) for stored, tensor in needed_tensors(facts).items())
    types = {name: dtype for name, dtype in named if name is not None}
    clause = _experts_in_one(facts, method, weights, types)
    clause = clause or _transposed(weights, method, types) or _moved(facts, config, method, weights, types)
    if clause is None and ranks > 1:
        clause = f"rows that are put in order cannot be divided over {ranks} ranks"
    if clause is not None:
        reason = f"its weights are quantized with {method.name}, but {facts.architecture} stores them in another order"
        remedy = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
        raise ModelError("unsupported_quantization", facts.path, f"{reason}, and {clause}", remedy)


def _check_up_projections(facts: ModelFacts, method: QuantMethod) -> None:
    for name, tensor in needed_tensors(facts).items():
        if UP_PROJECTION in name and tensor.dtype not in FLOATS:
            layer = name.partition(UP_PROJECTION)[0] + UP_PROJECTION
            reason = f"{layer} is quantized with {method.name}, and latent attention needs its weights unquantized"
            remedy = f"Quantize the model again without the layers {UP_PROJECTION[1:]}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _experts_in_one(
    facts: ModelFacts, method: QuantMethod, weights: StoredWeights, types: Mapping[str, str]
) -> str | None:
    """The clause that refuses weights of all experts in one tensor.

    A transposed one is refused where columns share scales in blocks, or inputs do: torchao has a scale for each row.
    """
    block = 1 if method.row_block is None else method.row_block(facts)
    for name, dtype in types.items():
        experts = _ALL_EXPERTS.match(name)
        if experts is None or dtype in FLOATS:
            continue
        found = f"the quantized weights of all experts of {experts[1]} are in one tensor"
        if not method.fused_experts:
            return found
        if weights.fused_experts and experts[2]:
            return f"{found} with a scale for each input"
        if weights.fused_experts and block > 1:
            return f"{found} whose columns share scales in blocks of {block}"
    return None


def _transposed(weights: StoredWeights, method: QuantMethod, types: Mapping[str, str]) -> str | None:
    if not types and weights.transposed and not method.turns_inputs:
        return f"{weights.transposed[0]} has its inputs as rows"
    for name, dtype in types.items():
        if dtype not in FLOATS and weights.is_transposed(name):
            return f"{name} has its inputs as rows"
    return None


def _moved(
    facts: ModelFacts, config: NativeConfig, method: QuantMethod, weights: StoredWeights, types: Mapping[str, str]
) -> str | None:
    """The clause that says which rows cannot change places; those of unquantized layers always can."""
    quantized = {name.rpartition(".")[0] for name, dtype in types.items() if dtype not in FLOATS}
    layers, rotary_dim = stored_attention(config, weights), interleaved_dims(facts, weights)
    moved = row_orders(weights, layers[0], rotary_dim)
    ends = [end for end in moved if not types or any(layer.endswith(end) for layer in quantized)]
    if ends and not method.row_tensors:
        return f"srv does not reorder the rows of {ends[0][1:]} that are quantized so"
    block = 1 if method.row_block is None else method.row_block(facts)
    if not ends or block == 1:
        return None
    found = crossing_rows(layers, rotary_dim, block)
    if found is not None and any(f".{name}" in ends for name in found.layers):
        rows = f"the {rotary_dim} rotary rows of a head of {found.layers[-1]}"
        return f"{rows} are not within one of its blocks of {block} rows"
    fused = f".{weights.fused}"
    if fused in ends and block_order(moved[fused], block) is None:
        return f"the rows of a head of {weights.fused} are not whole blocks of {block} rows"
    return None
