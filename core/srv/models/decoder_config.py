"""What the native decoder must know of a model: one dataclass for Llama, Mistral, Qwen2 and Qwen3.

Torch-free. Owns the differences between those architectures and the defaults of their configurations (those
of transformers); must not know how a layer computes. A configuration that asks for more is refused here, by
name, so that nothing in it is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.rope_config import RopeConfig, UnsupportedConfig, rope_config

# Fields that a configuration may leave out, with the value that transformers then takes.
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
# Fields of relatives of these models that change the computation; any value but those listed is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
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

    `qkv_bias`, `output_bias`, `mlp_bias`: linear layers with a bias. `head_norms`: RMS norm over each query
    and key head before the rotation (Qwen3). `windows`: for each layer None, or how many tokens a token
    sees, itself included.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def parameters(self) -> int:
        """How many numbers the model has, tied embeddings counted once."""
        hidden, queries, keys = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            (queries + 2 * keys) * self.qkv_bias + hidden * self.output_bias + 2 * self.head_dim * self.head_norms
        )
        mlp = (2 * self.intermediate_size + hidden) * self.mlp_bias
        embeddings = self.vocab_size * hidden * (1 if self.tied else 2)
        return embeddings + self.projections + self.layers * (attention + mlp + 2 * hidden) + hidden

    @property
    def projections(self) -> int:
        """How many of them are the weights of projections: all matrices but the embeddings and the output layer."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def with_defaults(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of a native architecture with what it may leave out filled in; others come back as is."""
    if architecture not in DEFAULTS:
        return dict(config)
    full = {**COMMON_DEFAULTS, **DEFAULTS[architecture], **config}
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full.get("num_attention_heads")
    return full


def decoder_config(architecture: str, config: Mapping[str, Any]) -> DecoderConfig:
    """The native decoder's configuration. Raises UnsupportedConfig naming what the layers do not do."""
    if architecture not in DEFAULTS:
        raise UnsupportedConfig(f"architecture {architecture} has no native layers")
    full = with_defaults(architecture, config)
    for name, neutral in NEUTRAL.items():
        value = full.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedConfig(f"{name} = {value!r} is not implemented natively")
    heads, kv_heads = int(full["num_attention_heads"]), int(full["num_key_value_heads"])
    head_dim = int(full.get("head_dim") or full["hidden_size"] // heads)
    if heads % kv_heads:
        raise UnsupportedConfig(f"{heads} attention heads are no multiple of {kv_heads} key heads")
    attention_bias = bool(full["attention_bias"]) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return DecoderConfig(
        vocab_size=int(full["vocab_size"]),
        hidden_size=int(full["hidden_size"]),
        intermediate_size=int(full["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(full["rms_norm_eps"]),
        tied=bool(full["tie_word_embeddings"]),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(full["mlp_bias"]) and architecture == "LlamaForCausalLM",
        head_norms=architecture == "Qwen3ForCausalLM",
        windows=_windows(architecture, full),
        rope=rope_config(full, head_dim),
    )


def _windows(architecture: str, full: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window, by the rules of transformers' configuration classes."""
    layers = int(full["num_hidden_layers"])
    window = full.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * layers
    if not full["use_sliding_window"]:
        return (None,) * layers
    first = int(full["max_window_layers"])
    kinds = full.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedConfig(f"layer_types names {unknown or len(kinds)} for {layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
