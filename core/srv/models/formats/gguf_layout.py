"""How GGUF files name and order the weights of a decoder, and what differs between architectures. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.formats.gguf_header import ROPE_FREQ_FACTORS, GGUFHeader, GGUFTensor

_NONE: Mapping[str, Any] = MappingProxyType({})
ROTARY_PROJECTIONS = ("q_proj", "k_proj")
TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
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
HEAD_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Of layers in which norms follow attention and MLP.
OUTPUT_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERT_COUNT = "expert_count"
EXPERT_FIELDS = {EXPERT_COUNT: "num_experts", "expert_used_count": "num_experts_per_tok"}


class GGUFLayout(NamedTuple):
    """The GGUF files of one architecture.

    `name`: their `general.architecture`. `permuted`: the projections whose rows are stored for interleaved rotary
    embeddings (see `gguf_loader`). `layer_names`: Hugging Face names of tensors of a layer besides `LAYER_NAMES`, or
    instead of these, by their names in the file. `fields`: fields of the Hugging Face configuration that are numbers in
    the metadata, by their keys without the architecture's prefix. Such a file must contain all of them, but may lack
    `optional_fields`. `complete`: makes the architecture's configuration from these fields and from those that all
    architectures have. `norms_plus_one`: the weights of norms are stored with 1 added to them.
    """

    name: str
    permuted: tuple[str, ...] = ()
    layer_names: Mapping[str, str] = _NONE
    fields: Mapping[str, str] = _NONE
    optional_fields: Mapping[str, str] = _NONE
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    norms_plus_one: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether these are files of models with experts, by which those of one `name` may differ."""
        return EXPERT_COUNT in self.fields

    def hugging_face_name(self, name: str) -> str:
        """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; unknown names are returned unchanged."""
        if name in TOP_LEVEL_NAMES:
            return TOP_LEVEL_NAMES[name]
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk":
            return name
        inner = self.layer_names.get(parts[2]) or LAYER_NAMES.get(parts[2])
        return f"model.layers.{parts[1]}.{inner}.{parts[3]}" if inner else name

    def is_permuted(self, name: str) -> bool:
        """Whether the rows of a weight, given by its Hugging Face name, are stored in another order."""
        return any(f".{projection}." in name for projection in self.permuted)

    def stored_offset(self, name: str) -> int:
        """What the file adds to a weight, given by its Hugging Face name."""
        return int(self.norms_plus_one and name.endswith("norm.weight"))


def weights_by_name(header: GGUFHeader, layout: GGUFLayout) -> dict[str, GGUFTensor]:
    """The weights of a file, by their Hugging Face names: those of experts are parts of one stored tensor."""
    weights: dict[str, GGUFTensor] = {}
    for stored, tensor in header.tensors.items():
        if stored == ROPE_FREQ_FACTORS:
            continue
        name = layout.hugging_face_name(stored)
        if "*" not in name or len(tensor.shape) < 2:
            weights[name] = tensor
            continue
        size = tensor.size // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            part = tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + expert * size, size=size)
            weights[name.replace("*", str(expert))] = part
    return weights
