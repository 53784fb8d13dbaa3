"""Llama 3.2 Vision, its language model: some layers attend to images only. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Embedding, Part, Tensors
from srv.models.blueprint.without_layers import UncachedAttention
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes


def mllama(c: Mapping[str, Any]) -> Part:
    """Layers that only attend to images keep nothing of text; eight rows of the embedding stand for images."""
    base = sizes(c, tied_embeddings=False, head_dim=c["hidden_size"] // c["num_attention_heads"])
    crossing, mlp = set(c["cross_attention_layers"] or range(3, 40, 5)), parts.mlp(base)
    own = parts.attention(base, norms=parts.head_norms(base), name="cross_attn")
    uncached = UncachedAttention(**{each.name: getattr(own, each.name) for each in dataclasses.fields(own)})
    gates = Tensors({"cross_attn_attn_gate": (1,), "cross_attn_mlp_gate": (1,)})
    crossed = dataclasses.replace(parts.pre_norm(base, uncached, mlp), after=(gates,))
    usual = parts.pre_norm(base, parts.attention(base), mlp)
    made = tuple(crossed if index in crossing else usual for index in range(base.layers))
    tree = parts.decoder(base, made)
    rows = Embedding(base.vocab_size + 8, base.hidden_size, name="embed_tokens")
    return dataclasses.replace(tree, stack=dataclasses.replace(tree.stack, embedding=rows))


ARCHITECTURE = Architecture(
    name="MllamaForCausalLM",
    tree=mllama,
    defaults=common(128256, 4096, 14336, 40, 32, 8, 131072, cross_attention_layers=None),
    layers=None,
    model_type="mllama_text_model",
)
