"""GPT-BigCode: GPT-2 with one key and value for all heads. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families import gpt2
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.without_layers import common, sizes


def gpt_bigcode(c: Mapping[str, Any]) -> Part:
    """GPT-2 with one key and value for all heads."""
    keys, inner = 1 if c["multi_query"] else c["num_attention_heads"], c["n_inner"] or 4 * c["hidden_size"]
    base = sizes(c, kv_heads=keys, intermediate_size=inner)
    positions = layer_norm.learned_positions(base, c["max_position_embeddings"])
    mixer = parts.attention(base, bias=True)
    return layer_norm.decoder(base, mixer, parts.mlp(base, True, "gelu_tanh"), before=(positions,))


_BIGCODE_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
ARCHITECTURE = Architecture(
    name="GPTBigCodeForCausalLM",
    tree=gpt_bigcode,
    defaults=common(50257, 768, 3072, 12, 12, None, 1024, n_inner=None, multi_query=True, tie_word_embeddings=True),
    layers=None,
    model_type="gpt_bigcode",
    weights=gpt2.ARCHITECTURE.weights,
    names=_BIGCODE_NAMES,
)
