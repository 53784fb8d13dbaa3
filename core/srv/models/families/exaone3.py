"""EXAONE 3, 3.5 and Deep: Llama with names of its own. Published with its code; transformers has no class."""

from __future__ import annotations

from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders.decoder_fields import DEFAULTS
from srv.models.families.llama import tree

ARCHITECTURE = Architecture(
    name="ExaoneForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    names={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "wte": "model.embed_tokens",
                "ln_f": "model.norm",
                "h.*.ln_1": "model.layers.*.input_layernorm",
                "h.*.ln_2": "model.layers.*.post_attention_layernorm",
                "h.*.attn.attention.q_proj": "model.layers.*.self_attn.q_proj",
                "h.*.attn.attention.k_proj": "model.layers.*.self_attn.k_proj",
                "h.*.attn.attention.v_proj": "model.layers.*.self_attn.v_proj",
                "h.*.attn.attention.out_proj": "model.layers.*.self_attn.o_proj",
                "h.*.mlp.c_fc_0": "model.layers.*.mlp.gate_proj",
                "h.*.mlp.c_fc_1": "model.layers.*.mlp.up_proj",
                "h.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
            },
        ),
    ),
)
