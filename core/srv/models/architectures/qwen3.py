"""Qwen3: RMS norm over query and key heads; otherwise Qwen2 with optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.qwen2 import QWEN_DEFAULTS, windows
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, GGUFLayout


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(config["attention_bias"])
    return decoder_config(config).replace(qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows(config))


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    make_config=make_config,
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    gguf=GGUFLayout("qwen3", weights=(HEAD_NORM_NAMES,)),
)
