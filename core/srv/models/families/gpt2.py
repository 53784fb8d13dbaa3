"""GPT-2: layers in sequence with biases, and learned positions. Its matrices are stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import QKV, Rename, Skip, Split, Transpose
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.gptj import NAMES
from srv.models.unsupported import refuse_unless

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    inner = config.get("n_inner")
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=None if inner is None else int(inner),
        norm_eps=float(config["layer_norm_epsilon"]),
        rotary=False,
    )
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=True),
        parts.mlp(sizes, True, layer_norm.activation(config, "activation_function")),
        before=(layer_norm.learned_positions(sizes, layer_norm.first_set_field(config, NAMES["context"])),),
    )


ARCHITECTURE = Architecture(
    name="GPT2LMHeadModel",
    tree=tree,
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
    },
    gguf=GGUFLayout(
        "gpt2",
        weights=(Rename({"position_embd": "model.embed_positions"}),),
        fields={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        sizes={"max_position_embeddings": ("position_embd.weight", 0), "n_inner": ("blk.0.ffn_up.weight", 0)},
    ),
    model_type="gpt2",
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "wte": "model.embed_tokens",
                "wpe": "model.embed_positions",
                "ln_f": "model.norm",
                "h.*.ln_1": "model.layers.*.input_layernorm",
                "h.*.ln_2": "model.layers.*.post_attention_layernorm",
                "h.*.attn.c_attn": "model.layers.*.self_attn.query_key_value",
                "h.*.attn.c_proj": "model.layers.*.self_attn.o_proj",
                "h.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
                "h.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
            },
        ),
        Skip(  # masks of old checkpoints
            tuple(f"{prefix}h.*.attn.{mask}" for prefix in ("", "transformer.") for mask in ("bias", "masked_bias"))
        ),
        Split("self_attn.query_key_value", QKV),
        Transpose(("self_attn.query_key_value", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")),
    ),
)
