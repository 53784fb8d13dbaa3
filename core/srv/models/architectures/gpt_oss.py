"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a window in every other layer.

The published checkpoints have experts in MXFP4 (`srv.quantization.formats.mxfp4`); others are unquantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config, windows_of_pattern
from srv.models.formats.stored_weights import StoredWeights
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.rope_config import refuse_unless

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


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    refuse_unless(config, SUPPORTED)
    given = config if config.get("rope_parameters") or config.get("rope_scaling") else {**config, "rope_scaling": ROPE}
    base, bias = decoder_config(given, reads=("num_local_experts",)), bool(config["attention_bias"])
    routing = Routing(int(config["num_experts_per_tok"]), scoring="softmax_of_top_k")
    moe = MoEConfig(
        int(config["num_local_experts"]),
        base.intermediate_size,
        routing,
        activation="swiglu_clamped",
        router="router",
        expert_bias=True,
        router_bias=True,
    )
    return base.replace(
        qkv_bias=bias,
        output_bias=bias,
        windows=windows_of_pattern(config, base.layers),
        sinks=True,
        moe=moe,
        moe_layers=(True,) * base.layers,
    )


ARCHITECTURE = Architecture(
    name="GptOssForCausalLM",
    make_config=make_config,
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
    model_type="gpt_oss",
    weights=StoredWeights(fused_experts="pairs"),
)
