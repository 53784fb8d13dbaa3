"""MiniCPM 3: latent attention in a dense model. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, latent, sizes, uniform


def minicpm3(c: Mapping[str, Any]) -> Part:
    """Latent attention in a dense model."""
    base = sizes(c)
    return uniform(base, latent(c, base), parts.mlp(base, bool(c.get("mlp_bias"))))


ARCHITECTURE = Architecture(
    name="MiniCPM3ForCausalLM",
    tree=minicpm3,
    defaults=common(
        73448,
        2560,
        6400,
        62,
        40,
        40,
        32768,
        tie_word_embeddings=True,
        mlp_bias=False,
        kv_lora_rank=256,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=None,
    ),
    layers=None,
    model_type="minicpm3",
)
