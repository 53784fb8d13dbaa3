"""How GGUF files name and order the weights of a decoder, and what differs between architectures. Torch-free.

The rules are those of `srv.models.checkpoints.rules`. A name in the layers may have a second "*", for the number of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.checkpoints.gguf_header import ROPE_FACTORS, GGUFHeader, GGUFTensor
from srv.models.checkpoints.row_orders import RowOrder, SizedRules
from srv.models.checkpoints.rules import GATE_UP, QKV, PermuteRotary, Rename, Skip, Split, WeightMapping

_NONE: Mapping[str, Any] = MappingProxyType({})


def layer_names(names: Mapping[str, str]) -> Rename:
    """The rule of names within a layer: {"attn_q": "self_attn.q_proj"}."""
    return Rename({f"blk.*.{stored}": f"model.layers.*.{name}" for stored, name in names.items()})


_TOP_LEVEL_NAMES = Rename({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_LAYER_NAMES = layer_names(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",  # one tensor for all experts
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
        "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
# Matrices that some files have in place of their parts.
_FUSED = (Split("self_attn.qkv_proj", QKV), Split("gate_up_proj", GATE_UP))
FUSED_MLP = layer_names({"ffn_up": "mlp.gate_up_proj"})
HEAD_NORM_NAMES = layer_names({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
# Of layers in which norms follow attention and MLP.
OUTPUT_NORM_NAMES = layer_names(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
EXPERT_COUNT = "expert_count"
EXPERT_FIELDS = {EXPERT_COUNT: "num_experts", "expert_used_count": "num_experts_per_tok"}
# Of DeepSeek and those that choose experts as it does.
ROUTING_FIELDS = {
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
SIGMOID_ROUTER: Mapping[str, tuple[Any, ...]] = {"expert_gating_func": (0, 2)}  # not stated, or a sigmoid
SHARED_EXPERTS = layer_names(
    {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
)
# Of encoders, in which norms follow attention and MLP.
ENCODER_NAMES = (
    Rename(
        {
            "token_embd_norm": "model.embed_norm",
            "position_embd": "model.embed_positions",
            "token_types": "model.embed_types",
        }
    ),
    layer_names({"attn_output_norm": "attention_norm", "layer_output_norm": "mlp_norm"}),
)
ENCODER_FIELDS = {"attention.layer_norm_epsilon": "layer_norm_eps"}
BOTH_WAYS: Mapping[str, tuple[Any, ...]] = {"attention.causal": (False,)}


def state_space_names(prefix: str) -> Rename:
    """The names of a Mamba-2 layer, or of one with the gated delta rule; `prefix`: of the part of a layer."""
    return layer_names(
        {
            "ssm_in": f"{prefix}.in_proj",
            "ssm_conv1d": f"{prefix}.conv1d",
            "ssm_a": f"{prefix}.A_log",
            "ssm_d": f"{prefix}.D",
            "ssm_dt.bias": f"{prefix}.dt_bias",
            "ssm_norm": f"{prefix}.norm",
            "ssm_out": f"{prefix}.out_proj",
        }
    )


class GGUFLayout(NamedTuple):
    """The GGUF files of one architecture.

    `name`: their `general.architecture`. `marks`: names of tensors within layers ("exp_probs_b"), and keys of the
    metadata without the architecture's prefix, that only files of this architecture have among those with this name.

    Their weights: `weights` is what they store otherwise than most: a `PermuteRotary`, a `Split`, and a `Rename` of
    tensors that others do not have, or have under other names (`layer_names`). `rules_if`: further rules, before these,
    where a field of the configuration is true. `whole`: fused matrices that layers have as well. `orders(config)`: rows
    that are stored in another order, by the last parts of the names of layers. `norms_plus_one`: the weights of norms
    are stored with 1 added to them, but for `plain_norms`, the ends of their names.

    Their configuration, with the names of Hugging Face: `fields` are in the metadata, by their keys without the prefix:
    numbers, or lists with one for each layer. Such a file must contain all of them, but may lack `optional_fields`.
    `sizes`: fields that are the size of a tensor, by its name and the number of the axis. `present`: fields that say
    whether the file has a tensor, by its name. `constants`: fields that have the same value in all files. `implied`:
    what keys of the metadata may say of how layers compute that other architectures do otherwise, and no field says.
    `complete`: makes the architecture's configuration from these fields and from those that all architectures have.
    """

    name: str
    weights: tuple[Rename | Skip | PermuteRotary | Split, ...] = ()
    fields: Mapping[str, str] = _NONE
    optional_fields: Mapping[str, str] = _NONE
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    norms_plus_one: bool = False
    sizes: Mapping[str, tuple[str, int]] = _NONE
    constants: Mapping[str, Any] = _NONE
    present: Mapping[str, str] = _NONE
    plain_norms: tuple[str, ...] = ()
    orders: Callable[[Mapping[str, Any]], Mapping[str, RowOrder]] | None = None
    marks: tuple[str, ...] = ()
    rules_if: Mapping[str, tuple[Rename | Split, ...]] = MappingProxyType({})
    whole: tuple[str, ...] = ()
    implied: Mapping[str, tuple[Any, ...]] = _NONE

    @property
    def has_experts(self) -> bool:
        """Whether these are files of models with experts, by which those of one `name` may differ."""
        return EXPERT_COUNT in self.fields

    def mapping(self, config: Mapping[str, Any]) -> WeightMapping:
        """The rules of the architecture, before those of all files. `config`: the fields of the model."""
        more = (rule for field, rules in self.rules_if.items() if config.get(field) for rule in rules)
        fused = (rule for rule in _FUSED if rule.matrix not in self.whole)
        return WeightMapping((*more, *self.weights, _TOP_LEVEL_NAMES, _LAYER_NAMES, *fused, Skip(ROPE_FACTORS)))

    @property
    def permutes_heads(self) -> bool:
        """Whether rotary pairs of queries and keys are adjacent, across whole heads."""
        return any(isinstance(rule, PermuteRotary) and rule.dims is None for rule in self.weights)

    def reads(self, key: str) -> bool:
        """Whether a key of the metadata becomes a field."""
        return key in self.fields or key in self.optional_fields

    def stored_offset(self, name: str) -> int:
        """What the file adds to a weight, given by its Hugging Face name."""
        return int(self.norms_plus_one and name.endswith("norm.weight") and not name.endswith(self.plain_norms))


def served_layers(header: GGUFHeader) -> int | None:
    """The number of layers, without those of multi-token prediction that follow them; None if the file is damaged."""
    prefix = header.metadata.get("general.architecture")
    blocks = header.metadata.get(f"{prefix}.block_count")
    predicting = header.metadata.get(f"{prefix}.nextn_predict_layers", 0)
    return blocks - predicting if isinstance(blocks, int) and isinstance(predicting, int) else None


def needed_tensors(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """The tensors of the layers that are computed, and those outside of layers, but for factors of RoPE."""
    layers = served_layers(header)

    def is_needed(name: str) -> bool:
        block, number = (*name.split(".", 2), "")[:2]
        unused = block == "blk" and layers is not None and number.isdecimal() and int(number) >= layers
        return name not in ROPE_FACTORS and not unused

    return {name: tensor for name, tensor in header.tensors.items() if is_needed(name)}


def weights_by_name(header: GGUFHeader, rules: SizedRules) -> dict[str, GGUFTensor]:
    """The weights of a file, by their Hugging Face names: parts of one stored tensor, if it holds several of them.

    `rules`: those of its layout, with the sizes of the model. Rows of parts are in the order of the layers, of other
    tensors in that of the file.
    """
    weights: dict[str, GGUFTensor] = {}
    for stored, tensor in needed_tensors(header).items():
        name = rules.mapping.layer_name(stored)
        if name is None:
            continue
        if "*" not in name or len(tensor.shape) < 2:
            weights |= _parts(name, tensor, rules)
            continue
        size = tensor.size // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            part = tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + expert * size, size=size)
            weights |= _parts(name.replace("*", str(expert)), part, rules)
    return weights


def _parts(name: str, tensor: GGUFTensor, rules: SizedRules) -> dict[str, GGUFTensor]:
    """The parts of a fused tensor, by their names; those of one whose rows are in another order have their rows."""
    sizes, names = rules.split_sizes(name, tensor.shape[0]), rules.mapping.split(name)
    if len(names) == 1 or sum(sizes) != tensor.shape[0]:
        return {name: tensor}
    order, row, begin = rules.stored_orders.get(_layer(name)), tensor.size // tensor.shape[0], 0
    parts: dict[str, GGUFTensor] = {}
    for part, size in zip(names, sizes, strict=True):
        made = tensor._replace(shape=(size, *tensor.shape[1:]), size=size * row)
        if order is None:
            parts[part] = made._replace(offset=tensor.offset + begin * row)
        else:
            parts[part] = made._replace(rows=tuple(order.rows[begin : begin + size]))
        begin += size
    return parts


def _layer(name: str) -> str:
    """The last parts of the name of a layer, by which rules name it: "self_attn.q_proj"."""
    return ".".join(name.split(".")[3:-1])
