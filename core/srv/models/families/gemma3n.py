"""Gemma 3n: embeddings per layer, several residual streams, and layers that read the cache of lower ones.

Its sizes alone are known. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Linear, Norm, Part, Tensors, alike
from srv.models.blueprint.without_layers import Group
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.without_layers import EPS, common, every, sizes, uncached, windows

SANDWICH = (
    *(parts.BEFORE_MIXER, parts.BEFORE_MLP),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def gemma3n(c: Mapping[str, Any]) -> Part:
    """Embeddings per layer, four alternative residual streams, and upper layers that read the cache of lower ones."""
    hidden, small, layers = c["hidden_size"], c["hidden_size_per_layer_input"], c["num_hidden_layers"]
    inner, streams, first_shared = c["intermediate_size"], c["altup_num_inputs"], layers - c["num_kv_shared_layers"]
    widths = tuple(inner[:layers]) if isinstance(inner, list) else (inner,) * layers
    base, norms, bias = sizes(c), parts.head_norms(sizes(c)), bool(c["attention_bias"])
    of_streams = _gemma3n_streams(base, small, streams, c["laurel_rank"])
    before_mixer, after_mixer, before_mlp, after_mlp = (Norm(hidden, EPS, name=name) for name in SANDWICH)

    def layer(kind: tuple[int | None, int, bool]) -> Layer:
        window, width, reads_lower = kind
        own = parts.attention(base, norms=norms, bias=bias, window=window)
        if reads_lower:
            queries = dataclasses.replace(own.qkv, outputs={"q_proj": own.qkv.outputs["q_proj"]})
            own = uncached(own, qkv=queries, k_norm=None)
        mlp = parts.mlp(base, activation="gelu_tanh_gated", inner=width)
        return Layer((before_mixer,), (own,), (after_mixer, before_mlp), mlp, (after_mlp, *of_streams))

    shared = [index >= first_shared for index in range(layers)]
    kinds = zip(windows(c, every(5)), widths, shared, strict=True)
    before = (
        Tensors({"weight": (c["vocab_size_per_layer_input"], small * layers)}, name="embed_tokens_per_layer"),
        Linear({"per_layer_model_projection": small * layers}, hidden),
        Norm(small, EPS, name="per_layer_projection_norm"),
        *(
            Tensors({f"{index}.weight": (hidden, hidden) for index in range(streams - 1)}, name=name)
            for name in ("altup_projections", "altup_unembed_projections")
        ),
    )
    return parts.decoder(base, alike(kinds, layer), before=before)


def _gemma3n_streams(base: Sizes, small: int, streams: int, rank: int) -> tuple[Part, ...]:
    hidden = base.hidden_size
    altup = (
        Tensors({"correct_output_scale": (hidden,)}),
        Linear({"correction_coefs": streams, "prediction_coefs": streams**2}, streams),
        Linear({"modality_router": streams}, hidden),
        Norm(hidden, EPS, name="router_norm"),
    )
    laurel = (
        Linear({"linear_left": rank}, hidden),
        Linear({"linear_right": hidden}, rank),
        Norm(hidden, EPS, name="post_laurel_norm"),
    )
    return (
        Group(altup, name="altup"),
        Group(laurel, name="laurel"),
        Linear({"per_layer_input_gate": small}, hidden),
        Linear({"per_layer_projection": hidden}, small),
        Norm(hidden, EPS, name="post_per_layer_input_norm"),
    )


ARCHITECTURE = Architecture(
    name="Gemma3nForCausalLM",
    tree=gemma3n,
    defaults=common(
        262400,
        2048,
        16384,
        35,
        8,
        2,
        32768,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        altup_num_inputs=4,
        laurel_rank=64,
        num_kv_shared_layers=15,
    ),
    layers=None,
    model_type="gemma3n_text",
)
