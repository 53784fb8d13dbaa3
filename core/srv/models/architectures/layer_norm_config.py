"""The configuration of decoders with LayerNorm: GPT-2, GPT-J, OPT, Phi, Cohere and others.

Torch-free. Owns the switches in which these differ, and what their fields have in common.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.described import Described
from srv.models.blueprint import HeadNorms, Layer, Norm, Order, Part, Sinusoids, Table
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config

MLPKind: TypeAlias = Literal["silu_gated", "gelu", "gelu_tanh", "relu"]
# By the names that configurations have for activations without a gate.
ACTIVATIONS: dict[str, MLPKind] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class LearnedPositions(NamedTuple):
    """Embeddings of positions: `rows` of them, of which `first` is that of a sequence's first token."""

    rows: int
    first: int = 0


@dataclass(frozen=True)
class LayerNormConfig(Described):
    """`decoder`: the sizes, biases and positions. The norms of this decoder are LayerNorms.

    `mlp`: its activation, and whether it has a gate. `parallel`: attention and MLP both read the norm of the residual
    before attention, and are added to it together. `separate_norms`: each of the two has a norm of its own, which
    layers that are not parallel always have. `norm_bias`: whether norms have a bias. `embedding_norm`: a norm follows
    the embedding. `residual_of_norm`: what is added to the residual replaces the norm that it was computed from, and
    not the value before it. `head_norms`: queries and keys have a LayerNorm with weights of its own for each head.
    `logits_bias`: the output layer has a bias. `sinusoidal`: positions are added to the embeddings, beginning with
    this one; None without them. `learned`: so are embeddings of positions; None without them. `joint_head_norms`:
    checkpoints have the weights of `head_norms` in one tensor for queries, and one for keys.
    """

    decoder: DecoderConfig
    mlp: MLPKind
    parallel: bool = False
    separate_norms: bool = True
    norm_bias: bool = True
    embedding_norm: bool = False
    residual_of_norm: bool = False
    head_norms: bool = False
    logits_bias: bool = False
    sinusoidal: int | None = None
    learned: LearnedPositions | None = None
    joint_head_norms: bool = False

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        before: list[Part] = []
        if self.sinusoidal is not None:
            before.append(Sinusoids(sizes.hidden_size, self.sinusoidal))
        if self.learned is not None:
            before.append(Table(self.learned.rows, sizes.hidden_size, self.learned.first, name="embed_positions"))
        if self.embedding_norm:
            before.append(self._norm("embed_norm"))
        made = parts.layers(list(zip(sizes.windows, sizes.rotated, strict=True)), self._layer)
        norm = self._norm("norm")
        return parts.decoder(sizes, made, norm, before=tuple(before), output_bias=self.logits_bias)

    def _layer(self, index: int) -> Layer:
        sizes, head_norms = self.decoder, None
        if self.head_norms:
            suffix = "norm" if self.joint_head_norms else "layernorm"
            head_norms = (
                HeadNorms(sizes.heads, sizes.head_dim, sizes.norm_eps, self.joint_head_norms, name=f"q_{suffix}"),
                HeadNorms(sizes.kv_heads, sizes.head_dim, sizes.norm_eps, self.joint_head_norms, name=f"k_{suffix}"),
            )
        own = (self._norm(parts.BEFORE_MLP),) if self.separate_norms else ()
        mlp = parts.mlp(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias, self.mlp)
        attention = parts.attention(sizes, index, head_norms=head_norms)
        order: Order = "normed_residual" if self.residual_of_norm else "sequence"
        order = "parallel" if self.parallel else order
        return Layer((self._norm(parts.BEFORE_MIXER),), (attention,), own, mlp, order=order)

    def _norm(self, name: str) -> Norm:
        return Norm(self.decoder.hidden_size, self.decoder.norm_eps, rms=False, bias=self.norm_bias, name=name)


def sizes(
    config: Mapping[str, Any],
    *,
    names: Mapping[str, tuple[str, ...]],
    intermediate: int | None = None,
    kv_heads: int | None = None,
    norm_eps: float,
    rotary: bool = True,
) -> DecoderConfig:
    """The sizes of a decoder without biases and windows.

    names: the fields with `hidden`, `layers`, `heads` and `context`; the first that is set counts. intermediate: four
    times the hidden size if it is None. kv_heads: all heads if it is None. rotary: whether layers have rotary
    embeddings. Raises UnsupportedConfig if a size does not divide another one, and KeyError for a missing field.
    """
    hidden, layers, heads, context = (_first(config, names[name]) for name in ("hidden", "layers", "heads", "context"))
    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads:
        raise UnsupportedConfig(
            f"a hidden size of {hidden} with {heads} heads and {kv_heads} key heads cannot be divided"
        )
    head_dim = hidden // heads
    rope = RopeConfig(1.0, head_dim, "default", context, context, {})
    if rotary:
        rope = rope_config({**config, "max_position_embeddings": context}, head_dim)
    return DecoderConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=norm_eps,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        windows=(None,) * layers,
        rotated=(rotary,) * layers,
        rope=rope,
        attention_scale=head_dim**-0.5,
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])


def activation(config: Mapping[str, Any], field: str) -> MLPKind:
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
