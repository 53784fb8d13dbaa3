"""What encoders have in common that are BERT with rotary positions: GTE, Nomic BERT and Jina embeddings v3.

Torch-free. Owns the fields of their configurations, and the names that transformers gives to the weights of its own
layers; published checkpoints have others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.encoders import encoder_sizes, head_sizes
from srv.models.layers.rope_config import rope_config, usable_context
from srv.models.unsupported import UnsupportedConfig

NAMES: dict[str, str] = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    **{f"layers.*.self_attn.{each}_proj": f"model.layers.*.self_attn.{each}_proj" for each in "qkvo"},
    "layers.*.post_attention_layernorm": "model.layers.*.attention_norm",
    "layers.*.post_mlp_layernorm": "model.layers.*.mlp_norm",
}
GATED_NAMES = {f"layers.*.mlp.{each}_proj": f"model.layers.*.mlp.{each}_proj" for each in ("gate", "up", "down")}


def rotary_sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes of an encoder whose layers have the same rotary embedding.

    Raises UnsupportedConfig with what is not implemented.
    """
    heads, head_dim = head_sizes(config, stated=True)
    rope = rope_config(config, head_dim)
    if rope.rotary_dim != head_dim:
        raise UnsupportedConfig(f"{rope.rotary_dim} rotated dimensions of {head_dim} are not implemented natively")
    return encoder_sizes(config, heads, head_dim, float(config["layer_norm_eps"]))._replace(rope=rope)


def rotary_positions(config: Mapping[str, Any]) -> int:
    """The most tokens of a prompt."""
    declared = int(config["max_position_embeddings"])
    return min(declared, usable_context(config, declared))


def with_prefixes(prefixes: tuple[str, ...], names: Mapping[str, str]) -> dict[str, str]:
    """Names as of `Rename` for checkpoints with any of several prefixes."""
    return {f"{prefix}{stored}": name for prefix in prefixes for stored, name in names.items()}
