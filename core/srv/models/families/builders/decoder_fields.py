"""What the fields of decoders have in common: sizes, windows, and what no family of them implements.

Torch-free; the file of each family says what it does otherwise. Must not know how a layer computes. A configuration
that needs anything else is refused here, with the name of the field, so that no field is silently ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.layers.rope_config import RopeConfig, rope_config
from srv.models.unsupported import InvalidConfig, UnsupportedConfig, refuse_unless

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


class Sizes(NamedTuple):
    """The sizes that nearly all decoders have. `rope`: the rotary embedding of layers that have no other one; None in
    models without."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    layers: int
    rope: RopeConfig | None


def decoder_sizes(config: Mapping[str, Any], reads: Collection[str] = ()) -> Sizes:
    """The sizes of a decoder, from fields with all defaults filled in.

    `reads`: the fields of `UNSUPPORTED_UNLESS` that the family reads itself, and "partial_rotary_factor" if it rotates
    a part of each head. Raises UnsupportedConfig with the field that is not implemented.
    """
    counts = tuple(config.get(name) for name in COUNT_FIELDS if name in reads)  # the other field may state it as well
    supported = {name: values for name, values in UNSUPPORTED_UNLESS.items() if name not in reads}
    refuse_unless(config, supported | {name: (0, *counts) for name in COUNT_FIELDS if name in supported})
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads:
        raise InvalidConfig(f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    layers, rope = int(config["num_hidden_layers"]), rope_config(config, head_dim)
    if rope.rotary_dim != head_dim and "partial_rotary_factor" not in reads:  # transformers ignores it in these classes
        share = f"rotary embeddings of only {rope.rotary_dim} of {head_dim} dimensions (partial_rotary_factor)"
        raise UnsupportedConfig(f"{share} are not implemented natively")
    return Sizes(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        layers=layers,
        rope=rope,
    )


def with_default_rope(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these RoPE parameters, if it states none."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    return dict(config) if stated else {**config, "rope_parameters": parameters}


def one_window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of layers which all have the same one; null and numbers below 1 are none."""
    window = config.get("sliding_window")
    return None if window is None or window < 1 else int(window)


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
        raise InvalidConfig(f"sliding_window = {window!r} of layers of sliding_attention is not a number of tokens")
    return windows_of_types(types, layers, int(window or 0))


def soft_cap(config: Mapping[str, Any], field: str) -> float | None:
    """The bound of scores or logits in a field; None or 0 for none. Raises UnsupportedConfig for a negative one."""
    value = config.get(field)
    if value is not None and not float(value) >= 0:
        raise UnsupportedConfig(f"{field} = {value!r} is not a positive number")
    return float(value) if value else None
