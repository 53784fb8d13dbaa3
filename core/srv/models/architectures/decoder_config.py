"""The configuration of the native decoder: one type for all architectures that share its layers.

Torch-free. Owns what these architectures have in common; the file of each one says what it does otherwise. Must not
know how a layer computes. A configuration that needs anything else is refused here, with the name of the field, so that
no field is silently ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from srv.models.architectures.architecture import DividedSizes
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config
from srv.specs import AttentionLayer

# The values that transformers uses for fields that a configuration leaves out.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
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
    "is_causal": (True,),
}


class DecoderConfig(NamedTuple):
    """Sizes and switches of a pre-norm decoder with rotary attention and a gated MLP.

    `qkv_bias`, `output_bias`, `mlp_bias`: whether these linear layers have a bias. `qk_norm`: RMS norm over each
    query and key head before the rotary embedding (Qwen3). `windows`: the sliding window of each layer, in tokens
    including the attending one, or None for full attention. `rotated`: whether each layer has a rotary embedding.
    `attention_scale` multiplies the products of queries and keys, `embedding_multiplier` the embeddings and
    `residual_multiplier` what attention and MLP add to the residual; logits are divided by `logits_divisor`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    rope: RopeConfig
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    @property
    def layers(self) -> int:
        return len(self.windows)

    def attention_layer(self, index: int) -> AttentionLayer:
        window = self.windows[index]
        return AttentionLayer(index, self.heads, self.kv_heads, self.head_dim, self.attention_scale, window)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(self.attention_layer(index) for index in range(self.layers))

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

    @property
    def divided(self) -> DividedSizes | None:
        return DividedSizes(self.heads, self.kv_heads, self.head_dim, self.intermediate_size, self.vocab_size)

    def of_rank(self, ranks: int) -> DecoderConfig:
        """The part of one of `ranks` ranks; norms and few KV heads are on every rank."""
        return self._replace(
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            intermediate_size=self.intermediate_size // ranks,
            vocab_size=self.vocab_size // ranks,
        )


def decoder_config(config: Mapping[str, Any], reads: Collection[str] = ()) -> DecoderConfig:
    """The configuration of a decoder without biases, windows and multipliers, from fields with all defaults filled in.

    An architecture replaces what it does otherwise. `reads`: the fields of `UNSUPPORTED_UNLESS` that it reads itself.
    Raises UnsupportedConfig with the field that is not implemented.
    """
    for name, supported in UNSUPPORTED_UNLESS.items():
        value = config.get(name)
        if name not in reads and value is not None and value not in supported:
            raise UnsupportedConfig(f"{name} = {value!r} is not implemented natively")
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads:
        raise UnsupportedConfig(f"{heads} attention heads are not a multiple of {kv_heads} key heads")
    layers = int(config["num_hidden_layers"])
    return DecoderConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        windows=(None,) * layers,
        rotated=(True,) * layers,
        rope=rope_config(config, head_dim),
        attention_scale=head_dim**-0.5,
    )


def windows_of_types(types: Sequence[str], layers: int, window: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, from the field `layer_types`."""
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedConfig(f"layer_types contains the unknown {', '.join(map(repr, unknown))}")
    if len(types) != layers:
        raise UnsupportedConfig(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
