"""Gemma 2: bounded scores and logits, norms before and after attention and MLP, and a window in every other layer.

Torch-free. GGUF files contain neither `query_pre_attn_scalar` nor which layers have a
window; both are filled in as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import OUTPUT_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, soft_cap, windows_of_pattern
from srv.models.families.builders.sandwich import attention_scale, sandwich_decoder
from srv.models.unsupported import refuse_unless

PATTERN = 2  # every second layer has full attention
LAYERS_OF_27B = 46  # the one size whose attention scale does not follow from the size of its heads
SCORES, LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes(config, reads=("hidden_act", SCORES, LOGITS))  # the first is not read by transformers either
    bias = bool(config["attention_bias"])
    windows, scale = windows_of_pattern(config, sizes.layers), attention_scale(config)
    scores_cap, logits_cap = soft_cap(config, SCORES), soft_cap(config, LOGITS)

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=bias, scale=scale, window=window, soft_cap=scores_cap)

    mlp, factor = parts.mlp(sizes, activation="gelu_tanh_gated"), sizes.hidden_size**0.5
    return sandwich_decoder(sizes, alike(windows, attention), mlp, wide=True, factor=factor, logits_soft_cap=logits_cap)


def _complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a GGUF file, with what llama.cpp derives from the number of layers and other sizes."""
    of_27b = config["num_hidden_layers"] == LAYERS_OF_27B
    scalar = config["hidden_size"] // config["num_attention_heads"] if of_27b else config["head_dim"]
    return {
        **{name: value for name, value in config.items() if name not in ("hidden_act", "use_sliding_window")},
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(config["sliding_window"]),
    }


ARCHITECTURE = Architecture(
    name="Gemma2ForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": PATTERN,
        LOGITS: 30.0,
        SCORES: 50.0,
    },
    gguf=GGUFLayout(
        "gemma2",
        weights=(OUTPUT_NORM_NAMES,),
        fields={"attention.sliding_window": "sliding_window", SCORES: SCORES, LOGITS: LOGITS},
        complete=_complete_gguf,
        norms_plus_one=True,
    ),
)
