"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a window in every other layer.

The published checkpoints have experts in MXFP4 (`srv.quantization.formats.mxfp4`); others are unquantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, GGUFLayout, layer_names
from srv.models.checkpoints.rules import StackedExperts
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, windows_of_pattern
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import refuse_unless

PATTERN = 2  # every second layer has full attention
# What transformers fills in if a configuration has no rotary parameters.
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The activation of the op `experts` has these constants.
SUPPORTED: dict[str, tuple[Any, ...]] = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    given = config if config.get("rope_parameters") or config.get("rope_scaling") else {**config, "rope_scaling": ROPE}
    sizes, bias = decoder_sizes(given, reads=("num_local_experts",)), bool(config["attention_bias"])
    experts = parts.mixture(
        sizes,
        int(config["num_local_experts"]),
        sizes.intermediate_size,
        Routing(int(config["num_experts_per_tok"]), scoring="softmax_of_top_k"),
        activation="swiglu_clamped",
        bias=True,
        router="router",
        router_bias=True,
    )

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=bias, window=window, sinks=True)

    attentions = alike(windows_of_pattern(config, sizes.layers), attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attentions, experts))


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "rope_parameters": {**config["rope_parameters"], "truncate": False}}


ARCHITECTURE = Architecture(
    name="GptOssForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "sliding_window_pattern": PATTERN,
    },
    gguf=GGUFLayout(
        "gpt-oss",
        weights=(layer_names({"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}),),
        fields={
            **EXPERT_FIELDS,
            EXPERT_COUNT: "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        complete=_of_gguf,
    ),
    model_type="gpt_oss",
    weights=(StackedExperts("pairs"),),
    runs_through_transformers=False,
)
