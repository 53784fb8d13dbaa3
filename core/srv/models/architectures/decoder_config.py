"""The configuration of the native decoder: one dataclass for Llama, Mistral, Qwen2 and Qwen3.

Torch-free. Owns the differences between those architectures and the defaults of their configurations (those of
transformers). Must not know how a layer computes. A configuration that needs anything else is refused here, with the
name of the field, so that no field is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config

# The values that transformers uses for fields that a configuration leaves out.
COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768, **QWEN_DEFAULTS},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        **QWEN_DEFAULTS,
    },
}
NATIVE = tuple(DEFAULTS)
# Fields of related models that change the computation: any value other than those listed is refused.
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "no_rope_layers": (),
    "quantization_config": (),
    "is_causal": (True,),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a pre-norm decoder with rotary attention and a gated MLP.

    `qkv_bias`, `output_bias`, `mlp_bias`: whether these linear layers have a bias. `qk_norm`: RMS norm over each
    query and key head before the rotary embedding (Qwen3). `windows`: the sliding window of each layer, in tokens
    including the attending one, or None for full attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def parameters(self) -> int:
        """The number of parameters; tied embeddings count once."""
        hidden, queries, keys = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (queries + 2 * keys) * self.qkv_bias + hidden * self.output_bias + 2 * self.head_dim * self.qk_norm
        mlp = (2 * self.intermediate_size + hidden) * self.mlp_bias
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.projection_params + self.layers * (attention + mlp + 2 * hidden) + hidden

    @property
    def projection_params(self) -> int:
        """The number of weights in linear layers, without the embeddings and the output layer (and without biases)."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def with_defaults(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its native architecture filled in; others are returned unchanged."""
    if architecture not in DEFAULTS:
        return dict(config)
    filled = {**COMMON_DEFAULTS, **DEFAULTS[architecture], **config}
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = filled.get("num_attention_heads")
    return filled


def decoder_config(architecture: str, config: Mapping[str, Any]) -> DecoderConfig:
    """The native decoder's configuration. Raises UnsupportedConfig with the field that is not implemented."""
    if architecture not in DEFAULTS:
        raise UnsupportedConfig(f"architecture {architecture} has no native layers")
    config = with_defaults(architecture, config)
    for name, supported in UNSUPPORTED_UNLESS.items():
        value = config.get(name)
        if value is not None and value not in supported:
            raise UnsupportedConfig(f"{name} = {value!r} is not implemented natively")
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads:
        raise UnsupportedConfig(f"{heads} attention heads are not a multiple of {kv_heads} key heads")
    attention_bias = bool(config["attention_bias"]) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return DecoderConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(config["mlp_bias"]) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(architecture, config),
        rope=rope_config(config, head_dim),
    )


def _windows(architecture: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer, by the rules of transformers' configuration classes."""
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * layers
    if not config["use_sliding_window"]:
        return (None,) * layers
    first = int(config["max_window_layers"])
    types = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedConfig(f"layer_types contains the unknown {', '.join(map(repr, unknown))}")
    if len(types) != layers:
        raise UnsupportedConfig(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
