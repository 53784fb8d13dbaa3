"""The rules of a model's checkpoint, and which of them quantized weights can follow.

Torch-free: a plan asks the same before there is a device. Must not know how a method stores weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models import derive
from srv.models.blueprint import Part
from srv.models.checkpoints.row_orders import SizedRules
from srv.models.checkpoints.rules import WeightMapping
from srv.models.checkpoints.text_names import needed_tensors
from srv.models.facts.checkpoint_tensors import checkpoint_tensors
from srv.models.families.registry import weight_mapping, with_defaults
from srv.quantization.method import UP_PROJECTION, QuantMethod, StoredModel
from srv.quantization.schemes import LayerSchemes
from srv.specs import ModelFacts

_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(_?)(gate_up_proj|down_proj)")  # of all experts of a layer in one tensor
_EXPERT = ".experts."


def sized_rules(facts: ModelFacts, tree: Part) -> SizedRules | None:
    """The rules of the safetensors files of a model; None if they rename tensors at most."""
    mapping = weight_mapping(facts.architecture, facts.text_part_of)
    if facts.format == "gguf" or mapping.only_renames:
        return None
    layers, rotary, rotary_dim = derive.attention_layers(tree), mapping.rotary, 0
    fields = with_defaults(facts.architecture, facts.config)
    if rotary is not None and layers:
        rotary_dim = layers[0].head_dim if rotary.dims is None else rotary.dims(fields)
    unit_rows = [rule.matrix for rule in mapping.unit_rows if rule.applies(fields)]
    return SizedRules(mapping, layers, rotary_dim, unit_rows)


def fused_mapping(facts: ModelFacts, method: QuantMethod | None) -> WeightMapping | None:
    """The mapping of a quantized checkpoint, whose fused matrices stay whole; None for all others."""
    if method is None or method.online or facts.format == "gguf":
        return None
    mapping = weight_mapping(facts.architecture, facts.text_part_of)
    return None if mapping.only_renames else mapping


def layer_schemes(model: ModelFacts, method: QuantMethod | None) -> LayerSchemes:
    """The scheme of each layer, by the names that layers have. Raises ModelError for damaged files.

    `method`: None for unquantized weights. The inputs that the function takes are those of whole layers.
    """
    if method is None or method.schemes is None:
        return lambda names, inputs, embedding: None
    schemes = method.schemes(StoredModel(model, {}) if method.online else checkpoint_tensors(model))
    mapping = fused_mapping(model, method)
    if mapping is None:
        return schemes
    return lambda names, inputs, embedding: schemes(mapping.fused(names), inputs, embedding)


def has_quantized_experts(facts: ModelFacts) -> bool:
    """Whether a mixture of experts is quantized: its tensors say so; without weights, all are taken for quantized."""
    tensors = needed_tensors(facts)
    return not tensors or any(_EXPERT in name and each.dtype not in FLOATS for name, each in tensors.items())


def check_rules(facts: ModelFacts, tree: Part, method: QuantMethod) -> None:
    """Refuse quantized weights that the layers can hold neither as they are stored nor in the order of the layers.

    Raises ModelError (unsupported_quantization).
    """
    if not method.online and not method.up_projections:
        _check_up_projections(facts, method)
    rules = None if method.online else sized_rules(facts, tree)
    if rules is None:
        return
    mapping = rules.mapping
    named = ((mapping.layer_name(stored), tensor.dtype) for stored, tensor in needed_tensors(facts).items())
    types = {name: dtype for name, dtype in named if name is not None}
    clause = _stacked_experts(facts, method, mapping, types)
    clause = clause or _transposed(mapping, method, types) or _permuted(facts, method, rules, types)
    clause = clause or _unit_rows(rules, types)
    if clause is not None:
        raise _stored_in_another_order(facts, method, clause)


def check_dequantized(facts: ModelFacts, tree: Part, method: QuantMethod) -> None:
    """Refuse quantized weights of which the loader cannot make those of unquantized layers.

    Raises ModelError (unsupported_quantization).
    """
    rules = sized_rules(facts, tree)
    if rules is None:
        return
    types = {
        name: each.dtype for stored, each in needed_tensors(facts).items() if (name := rules.mapping.layer_name(stored))
    }
    clause = _stacked_experts(facts, method, rules.mapping, types) or _transposed(rules.mapping, method, types)
    if clause is not None:
        raise _stored_in_another_order(facts, method, clause)


def _stored_in_another_order(facts: ModelFacts, method: QuantMethod, clause: str) -> ModelError:
    reason = f"its weights are quantized with {method.name}, but {facts.architecture} stores them in another order"
    remedy = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
    return ModelError("unsupported_quantization", facts.path, f"{reason}, and {clause}", remedy)


def _check_up_projections(facts: ModelFacts, method: QuantMethod) -> None:
    for name, tensor in needed_tensors(facts).items():
        if UP_PROJECTION in name and tensor.dtype not in FLOATS:
            layer = name.partition(UP_PROJECTION)[0] + UP_PROJECTION
            reason = f"{layer} is quantized with {method.name}, and latent attention needs its weights unquantized"
            remedy = f"Quantize the model again without the layers {UP_PROJECTION[1:]}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _stacked_experts(
    facts: ModelFacts, method: QuantMethod, mapping: WeightMapping, types: Mapping[str, str]
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
        if mapping.expert_columns and experts[2]:
            return f"{found} with a scale for each input"
        if mapping.expert_columns and block > 1:
            return f"{found} whose columns share scales in blocks of {block}"
    return None


def _transposed(mapping: WeightMapping, method: QuantMethod, types: Mapping[str, str]) -> str | None:
    if not types and mapping.transposed and not method.turns_inputs:
        return f"{mapping.transposed[0]} has its inputs as rows"
    for name, dtype in types.items():
        if dtype not in FLOATS and mapping.is_transposed(name):
            return f"{name} has its inputs as rows"
    return None


def _unit_rows(rules: SizedRules, types: Mapping[str, str]) -> str | None:
    for matrix in rules.unit_rows:
        if any(name.startswith(f"{matrix}.") and dtype not in FLOATS for name, dtype in types.items()):
            return f"the rows of {matrix} are divided by their norms, which quantized ones cannot be"
    return None


def _permuted(facts: ModelFacts, method: QuantMethod, rules: SizedRules, types: Mapping[str, str]) -> str | None:
    """The clause that says which rows cannot change places; those of unquantized layers always can."""
    quantized = {name.rpartition(".")[0] for name, dtype in types.items() if dtype not in FLOATS}
    names = [name for name in rules.permuted if not types or any(layer.endswith(f".{name}") for layer in quantized)]
    if names and not method.row_tensors:
        return f"srv does not reorder the rows of {names[0]} that are quantized so"
    block = 1 if method.row_block is None else method.row_block(facts)
    return rules.leaves_blocks(names, block) if names and block > 1 else None
