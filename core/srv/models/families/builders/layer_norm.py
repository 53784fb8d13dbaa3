"""Decoders with LayerNorm: GPT-2, GPT-J, OPT, Phi, Cohere and others.

Torch-free. Owns what their trees and their fields have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from srv.models.blueprint import (
    MLP,
    Activation,
    Attention,
    Decoder,
    HeadNorms,
    Layer,
    MoE,
    Norm,
    Order,
    Part,
    Table,
    alike,
)
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.layers.rope_config import rope_config
from srv.models.unsupported import UnsupportedConfig

# By the names that configurations have for activations without a gate.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def norm(sizes: Sizes, name: str, bias: bool = True, wide: bool = False) -> Norm:
    """A layer norm of hidden states."""
    return Norm(sizes.hidden_size, sizes.norm_eps, rms=False, bias=bias, wide=wide, name=name)


def head_norms(sizes: Sizes, *, joint: bool = False) -> tuple[HeadNorms, HeadNorms]:
    """Norms of queries and keys, with weights of their own for each head. `joint`: as of `HeadNorms`."""
    suffix, dim, eps = "norm" if joint else "layernorm", sizes.head_dim, sizes.norm_eps
    queries = HeadNorms(sizes.heads, dim, eps, joint, name=f"q_{suffix}")
    return queries, HeadNorms(sizes.kv_heads, dim, eps, joint, name=f"k_{suffix}")


def learned_positions(sizes: Sizes, count: int, first: int = 0) -> Table:
    """Embeddings of positions. `first`: the row of a sequence's first token."""
    return Table(count + first, sizes.hidden_size, first, name="embed_positions")


def decoder(
    sizes: Sizes,
    attention: Attention | Sequence[Attention],
    mlp: MLP | MoE,
    *,
    order: Order = "sequence",
    separate_norms: bool = True,
    norm_bias: bool = True,
    wide: bool = False,
    before: tuple[Part, ...] = (),
    output_bias: bool = False,
    factor: float = 1.0,
    logits_divisor: float = 1.0,
) -> Decoder:
    """A decoder whose norms are layer norms. `separate_norms`: each part of a layer has one, which parts that are
    "parallel" need not. The others are fields of `Layer`, `Norm` and `Decoder`.
    """
    first, second, last = (
        norm(sizes, name, norm_bias, wide) for name in (parts.BEFORE_MIXER, parts.BEFORE_MLP, "norm")
    )
    between = (second,) if separate_norms else ()
    made = alike(parts.of_layers(sizes, attention), lambda each: Layer((first,), (each,), between, mlp, order=order))
    return parts.decoder(
        sizes,
        made,
        last,
        before=before,
        output_bias=output_bias,
        factor=factor,
        logits_divisor=logits_divisor,
    )


def sizes(
    config: Mapping[str, Any],
    *,
    names: Mapping[str, tuple[str, ...]],
    intermediate: int | None = None,
    kv_heads: int | None = None,
    norm_eps: float,
    rotary: bool = True,
) -> Sizes:
    """The sizes of a decoder.

    names: the fields with `hidden`, `layers`, `heads` and `context`; the first that is set counts. intermediate: four
    times the hidden size if it is None. kv_heads: all heads if it is None. rotary: whether layers have the rotary
    embedding that the fields state. Raises UnsupportedConfig if a size does not divide another one, and KeyError for a
    missing field.
    """
    hidden, layers, heads, context = (
        first_set_field(config, names[name]) for name in ("hidden", "layers", "heads", "context")
    )
    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads:
        raise UnsupportedConfig(
            f"a hidden size of {hidden} with {heads} heads and {kv_heads} key heads cannot be divided"
        )
    head_dim = hidden // heads
    return Sizes(
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=norm_eps,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        layers=layers,
        rope=rope_config({**config, "max_position_embeddings": context}, head_dim) if rotary else None,
    )


def first_set_field(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that is set. Raises KeyError without any."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])


def activation(config: Mapping[str, Any], field: str) -> Activation:
    """The activation of an MLP without a gate. Raises UnsupportedConfig for one that is not implemented."""
    name = config[field]
    if name not in ACTIVATIONS:
        raise UnsupportedConfig(f"{field} = {name!r} is not implemented natively")
    return ACTIVATIONS[name]


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (Press et al. 2022, arXiv:2108.12409): 2^(-8 / n), 2^(-16 / n), ... for n heads.

    If n is not a power of two, those of the next smaller one, p, are followed by every other slope for 2 p heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    more = [2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * (heads - power), 2)]
    return (*slopes, *more)
