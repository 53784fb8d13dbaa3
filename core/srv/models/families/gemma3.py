"""Gemma 3 (text): the facts of a decoder whose layers have four norms, and most of which attend to a sliding window.

Layers with a window have a rotary embedding of their own. Torch-free. GGUF files contain
neither `query_pre_attn_scalar` nor, usually, which layers have a window; both are filled in as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import Attention, Decoder, Part, alike
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, OUTPUT_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, windows_of_pattern
from srv.models.families.builders.sandwich import (
    KINDS,
    attention_scale,
    local_rope,
    sandwich_decoder,
    with_rope_of,
)
from srv.models.unsupported import refuse_unless

PATTERN = 6  # every sixth layer has full attention
LAYERS_OF_27B = 62  # the one size whose attention scale does not follow from the size of its heads
# Only these values of fields that change the computation are implemented; None is as if the field were left out.
SUPPORTED: dict[str, tuple[Any, ...]] = {"hidden_activation": ("gelu_pytorch_tanh",)}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"use_bidirectional_attention": (False,)})
    return text_model(config)


def text_model(config: Mapping[str, Any]) -> Decoder:
    """The layers with an output layer. Where tokens attend to later ones, the field of the window counts both sides
    (EmbeddingGemma).
    """
    refuse_unless(config, SUPPORTED)
    both_ways = bool(config.get("use_bidirectional_attention"))
    if both_ways:
        config = {**config, "sliding_window": int(config["sliding_window"]) // 2 + 1}
    full = with_rope_of(config, "full_attention", "rope_theta")
    sizes = decoder_sizes(full, reads=("hidden_act",))  # which transformers does not read for this architecture
    bias, norms = bool(config["attention_bias"]), parts.head_norms(sizes, wide=True)
    windows, scale = windows_of_pattern(config, sizes.layers), attention_scale(config)
    local = local_rope(config, sizes.head_dim, "rope_local_base_freq")

    def attention(window: int | None) -> Attention:
        rope = None if window is None else local
        made = parts.attention(sizes, bias=bias, norms=norms, rope=rope, scale=scale, window=window)
        return replace(made, bidirectional=both_ways)

    mlp, factor = parts.mlp(sizes, activation="gelu_tanh_gated"), sizes.hidden_size**0.5
    return sandwich_decoder(sizes, alike(windows, attention), mlp, wide=True, factor=factor)


def _complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a GGUF file, with what llama.cpp derives from the number of layers and other sizes."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    scalar = config["hidden_size"] // heads if layers == LAYERS_OF_27B else config["head_dim"]
    local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 10000.0)}
    return {
        **{name: value for name, value in config.items() if name not in ("hidden_act", "use_sliding_window")},
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(config["sliding_window"]),
        "sliding_window_pattern": int(config.get("sliding_window_pattern", PATTERN)),
        "rope_parameters": dict(zip(KINDS, (config["rope_parameters"], local), strict=True)),
    }


ARCHITECTURE = Architecture(
    name="Gemma3ForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": PATTERN,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    gguf=GGUFLayout(
        "gemma3",
        weights=(OUTPUT_NORM_NAMES, HEAD_NORM_NAMES),
        fields={"attention.sliding_window": "sliding_window"},
        optional_fields={
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        complete=_complete_gguf,
        norms_plus_one=True,
    ),
    model_type="gemma3_text",
)
