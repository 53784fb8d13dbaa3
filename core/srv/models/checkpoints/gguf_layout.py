"""How GGUF files name and order the weights of a decoder, and what differs between architectures. Torch-free.

The rules are those of `srv.models.checkpoints.rules`. A name in the layers may have a second "*", for the number of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.checkpoints.gguf_header import ROPE_FREQ_FACTORS, GGUFHeader, GGUFTensor
from srv.models.checkpoints.rules import PermuteRotary, Rename, Skip, WeightMapping

_NONE: Mapping[str, Any] = MappingProxyType({})


def layer_names(names: Mapping[str, str]) -> Rename:
    """The rule of names within a layer: {"attn_q": "self_attn.q_proj"}."""
    return Rename({f"blk.*.{stored}": f"model.layers.*.{name}" for stored, name in names.items()})


_TOP_LEVEL_NAMES = Rename(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER_NAMES = layer_names(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",  # one tensor for all experts
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
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


class GGUFLayout(NamedTuple):
    """The GGUF files of one architecture.

    `name`: their `general.architecture`. `weights`: what they store otherwise than most: `PermuteRotary()`, and a
    `Rename` of tensors that others do not have, or have under other names (`layer_names`). `fields`: fields of the
    Hugging Face configuration that are numbers in the metadata, by their keys without the architecture's prefix. Such a
    file must contain all of them, but may lack `optional_fields`. `complete`: makes the architecture's configuration
    from these fields and from those that all architectures have. `norms_plus_one`: the weights of norms are stored with
    1 added to them.
    """

    name: str
    weights: tuple[Rename | Skip | PermuteRotary, ...] = ()
    fields: Mapping[str, str] = _NONE
    optional_fields: Mapping[str, str] = _NONE
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    norms_plus_one: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether these are files of models with experts, by which those of one `name` may differ."""
        return EXPERT_COUNT in self.fields

    @property
    def mapping(self) -> WeightMapping:
        """The rules of the architecture, before those of all files."""
        return WeightMapping((*self.weights, _TOP_LEVEL_NAMES, _LAYER_NAMES, Skip((ROPE_FREQ_FACTORS,))))

    @property
    def permutes(self) -> bool:
        """Whether rotary pairs of queries and keys are adjacent."""
        return any(isinstance(rule, PermuteRotary) for rule in self.weights)

    def stored_offset(self, name: str) -> int:
        """What the file adds to a weight, given by its Hugging Face name."""
        return int(self.norms_plus_one and name.endswith("norm.weight"))


def weights_by_name(header: GGUFHeader, layout: GGUFLayout) -> dict[str, GGUFTensor]:
    """The weights of a file, by their Hugging Face names: those of experts are parts of one stored tensor."""
    mapping = layout.mapping
    weights: dict[str, GGUFTensor] = {}
    for stored, tensor in header.tensors.items():
        name = mapping.layer_name(stored)
        if name is None:
            continue
        if "*" not in name or len(tensor.shape) < 2:
            weights[name] = tensor
            continue
        size = tensor.size // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            part = tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + expert * size, size=size)
            weights[name.replace("*", str(expert))] = part
    return weights
