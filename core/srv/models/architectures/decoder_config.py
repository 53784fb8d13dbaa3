"""The configuration of the native decoder: one type for all architectures that share its layers.

Torch-free. Owns what these architectures have in common; the file of each one says what it does otherwise. Must not
know how a layer computes. A configuration that needs anything else is refused here, with the name of the field, so that
no field is silently ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.described import Described
from srv.models.blueprint import Decoder, Layer, Temperature
from srv.models.layers.moe_config import COUNT_FIELDS, MoEConfig
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, refuse_unless, rope_config

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


@dataclass(frozen=True)
class DecoderConfig(Described):
    """Sizes and switches of a pre-norm decoder with rotary attention and a gated MLP, or a mixture of experts.

    `qkv_bias`, `output_bias`, `mlp_bias`: whether these linear layers have a bias. `qk_norm`: RMS norm over each
    query and key head before the rotary embedding (Qwen3). `windows`: the sliding window of each layer, in tokens
    including the attending one, or None for full attention. `rotated`: whether each layer has a rotary embedding.
    `attention_scale` multiplies the products of queries and keys, `embedding_multiplier` the embeddings and
    `residual_multiplier` what attention and MLP add to the residual; logits are divided by `logits_divisor`.
    `alibi_slopes`: of each head, in models with ALiBi (`srv.specs.AttentionLayer.alibi`), else None.
    `wide_qk_norm`: the norms of `qk_norm` are over the queries, or keys, of all heads together (OLMo 2).
    `attention_soft_cap` and `logits_soft_cap`: c, where scores, or logits, are c tanh(x / c) (Gemma 2); None without.
    `moe`: the mixture of experts that layers have in place of the MLP; `moe_layers`: whether each layer has it, () for
    none. `chunks`: as `srv.specs.AttentionLayer.chunk` of each layer, () for none. `unit_rotated`: rotated queries and
    keys are divided by their root mean square. `temperature`: of the queries of layers without a rotary embedding.
    `sinks`: as in `srv.specs.AttentionLayer`.
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
    alibi_slopes: tuple[float, ...] | None = None
    wide_qk_norm: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    chunks: tuple[int | None, ...] = ()
    unit_rotated: bool = False
    temperature: Temperature | None = None
    sinks: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)

    def moe_of(self, index: int) -> MoEConfig | None:
        """The mixture of experts of a layer; None if it has an MLP."""
        return self.moe if self.moe_layers and self.moe_layers[index] else None

    @property
    def qkv_parts(self) -> tuple[int, int, int]:
        """The queries, the keys and the values of a token, in elements."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @functools.cached_property
    def tree(self) -> Decoder:
        chunks = self.chunks or (None,) * self.layers
        has_experts = self.moe_layers or (False,) * self.layers
        kinds = list(zip(self.windows, self.rotated, chunks, has_experts, strict=True))
        return parts.decoder(self, parts.layers(kinds, self._layer), parts.last_norm(self))

    def _layer(self, index: int) -> Layer:
        return parts.pre_norm(self, parts.attention(self, index), parts.feed_forward(self, self.moe_of(index)))


def decoder_config(config: Mapping[str, Any], reads: Collection[str] = ()) -> DecoderConfig:
    """The configuration of a decoder without biases, windows and multipliers, from fields with all defaults filled in.

    An architecture replaces what it does otherwise. `reads`: the fields of `UNSUPPORTED_UNLESS` that it reads itself,
    and "partial_rotary_factor" if it rotates a part of each head. Raises UnsupportedConfig with the field that is not
    implemented.
    """
    counts = tuple(config.get(name) for name in COUNT_FIELDS if name in reads)  # the other field may state it as well
    supported = {name: values for name, values in UNSUPPORTED_UNLESS.items() if name not in reads}
    refuse_unless(config, supported | {name: (0, *counts) for name in COUNT_FIELDS if name in supported})
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads:
        raise UnsupportedConfig(f"{heads} attention heads are not a multiple of {kv_heads} key heads")
    layers, rope = int(config["num_hidden_layers"]), rope_config(config, head_dim)
    if rope.rotary_dim != head_dim and "partial_rotary_factor" not in reads:  # transformers ignores it in these classes
        share = f"rotary embeddings of only {rope.rotary_dim} of {head_dim} dimensions (partial_rotary_factor)"
        raise UnsupportedConfig(f"{share} are not implemented natively")
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
        rope=rope,
        attention_scale=head_dim**-0.5,
    )


def one_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, where all have the same; null and numbers below 1 are none."""
    window = config.get("sliding_window")
    return (None if window is None or window < 1 else int(window),) * layers


def windows_of_types(types: Sequence[str], layers: int, window: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, from the field `layer_types`."""
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedConfig(f"layer_types contains the unknown {', '.join(map(repr, unknown))}")
    if len(types) != layers:
        raise UnsupportedConfig(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def windows_of_pattern(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: by `layer_types`, or in all but every `sliding_window_pattern`-th layer."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    if types is None:
        pattern = int(config["sliding_window_pattern"])
        if pattern < 1:
            raise UnsupportedConfig(f"sliding_window_pattern = {pattern} is not a number of layers")
        types = [("sliding_attention" if (layer + 1) % pattern else "full_attention") for layer in range(layers)]
    if "sliding_attention" in types and (window is None or window < 1):
        raise UnsupportedConfig(f"sliding_window = {window!r} of layers of sliding_attention is not a number of tokens")
    return windows_of_types(types, layers, int(window or 0))


def soft_cap(config: Mapping[str, Any], field: str) -> float | None:
    """The bound of scores or logits in a field; None or 0 for none. Raises UnsupportedConfig for a negative one."""
    value = config.get(field)
    if value is not None and not float(value) >= 0:
        raise UnsupportedConfig(f"{field} = {value!r} is not a positive number")
    return float(value) if value else None
