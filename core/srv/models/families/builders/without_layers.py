"""What families without native layers build their trees with, from the fields of a configuration. Torch-free.

Epsilons, scales and rotary parameters are those of any model: no size depends on them. Must not know any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.families.builders.decoder_fields import Sizes
from srv.models.layers.rope_config import DEFAULT_THETA, RopeConfig

EPS = 1e-6


def sizes(c: Mapping[str, Any], **changes: Any) -> Sizes:
    """The sizes of a decoder. `changes`: other values of its fields."""
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // heads
    base = Sizes(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=dim,
        norm_eps=EPS,
        tied_embeddings=bool(c["tie_word_embeddings"]),
        layers=c["num_hidden_layers"],
        rope=_rope(c, dim),
    )
    return base._replace(**changes)


def _rope(c: Mapping[str, Any], dim: int) -> RopeConfig:
    return RopeConfig(DEFAULT_THETA, dim, "default", c["max_position_embeddings"], c["max_position_embeddings"], {})


def common(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, keys: int | None, context: int, **other: Any
) -> dict[str, Any]:
    """The defaults of fields that most configurations have, and `other` ones. `keys`: KV heads; None for all heads."""
    usual = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {**usual, **other}
