"""Encoders: BERT and those that differ from it in their norms, MLPs and positions.

Torch-free. Owns the switches in which these differ, and the tree that they stand for. An encoder attends in both
directions, so that a prompt is computed in one step, without a KV pool. Must not know how a layer computes:
`encoder_layers` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from srv.models.architectures.architecture import Pooled
from srv.models.architectures.described import Described
from srv.models.blueprint import (
    GATED,
    MLP,
    Activation,
    Attention,
    Embedding,
    Linear,
    Norm,
    Output,
    Part,
    Stack,
    Table,
    alike,
)
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig

LAYERS = "srv.models.architectures.encoder_layers:Encoder"
DEFAULT_LABELS = 2  # of transformers
# By the names that configurations have for activations of MLPs with a gate.
_GATED: dict[str, Activation] = {"gelu": "gelu_gated", "silu": "silu_gated", "swish": "silu_gated"}


@dataclass(frozen=True)
class EncoderLayer(Part):
    """`pre_norm`: norms precede attention and MLP; otherwise they follow the additions to the residual.

    `attention_norm`: None if that of the embeddings takes its place.
    """

    attention_norm: Norm | None
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    pre_norm: bool


@dataclass(frozen=True)
class EncoderStack(Stack):
    """An encoder without a head. `first_position`: the row of the first token in `positions`."""

    layers: tuple[EncoderLayer, ...]
    positions: Table | None
    types: Table | None
    embedding_norm: Norm | None
    final_norm: Norm | None
    first_position: int


@dataclass(frozen=True)
class ClassificationHead(Part):
    """score(norm(activation(dense(x)))). The norm is optional."""

    dense: Output
    norm: Norm | None
    score: Output
    activation: Activation


@dataclass(frozen=True)
class Encoder(Part):
    """An encoder, with a classification head if it has one."""

    stack: EncoderStack
    head: ClassificationHead | None


@dataclass(frozen=True)
class EncoderBlueprint(Described):
    """An encoder runs on one rank."""

    model: Encoder
    pooled: Pooled | None = None

    @functools.cached_property
    def tree(self) -> Encoder:
        return self.model

    @functools.cached_property
    def divided(self) -> None:
        return None


class HeadConfig(NamedTuple):
    """A classification head: dense layer, activation, an optional norm, and the layer with the labels.

    `activation`: of the dense layer.
    """

    labels: int
    activation: Activation = "tanh"
    dense_bias: bool = True
    norm: bool = False


class EncoderSizes(NamedTuple):
    """Sizes and switches of an encoder, from which `encoder` makes its tree.

    `windows`: of each layer, how far a token sees in both directions (`srv.specs.AttentionLayer.window`), or None.
    `positions`: the most tokens of a prompt. `activation`: of the MLP; `GATED` ones have a gate. `pre_norm`: norms
    precede attention and MLP, and one follows the last layer; otherwise they follow the additions to the residual.
    `embedding_norm`: a norm follows the embeddings; with `pre_norm`, it is the one before the first attention. `rms`:
    norms are RMSNorms, without a bias. `fused`: checkpoints have queries, keys and values in one matrix, and so the
    gate and the up projection. `mlp_bias`, `down_bias`: of the matrices before the down projection, and of that one.
    `position_offset`: the row of the first token in the table of positions; None if layers rotate queries and keys
    instead, by `ropes`, of which each layer has one. `types`: the kinds of tokens, 0 without a table of them. `head`:
    None without a classification head. `pooled_by`: see `Pooled`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...]
    positions: int
    activation: Activation
    pre_norm: bool = False
    embedding_norm: bool = True
    rms: bool = False
    norm_bias: bool = True
    fused: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool = True
    position_offset: int | None = 0
    ropes: tuple[RopeConfig, ...] = ()
    types: int = 2
    head: HeadConfig | None = None
    pooled_by: str = "mean"


def encoder_of(sizes: Callable[[Mapping[str, Any]], EncoderSizes]) -> Callable[[Mapping[str, Any]], EncoderBlueprint]:
    """From the fields of a configuration to the blueprint, by way of the sizes and switches."""
    return lambda config: encoder(sizes(config))


def encoder(sizes: EncoderSizes) -> EncoderBlueprint:
    """The tree of an encoder, and what its prompts and results are like."""
    hidden, head = sizes.hidden_size, sizes.head

    def norm(name: str) -> Norm:
        return Norm(hidden, sizes.norm_eps, sizes.rms, sizes.norm_bias and not sizes.rms, name=name)

    def layer(kind: tuple[int | None, RopeConfig | None, bool]) -> EncoderLayer:
        return _layer(sizes, norm, *kind)

    def table(name: str, rows: int | None) -> Table | None:
        return Table(rows, hidden, name=name) if rows else None

    ropes = sizes.ropes or (None,) * len(sizes.windows)
    normed = sizes.pre_norm and sizes.embedding_norm
    kinds = enumerate(zip(sizes.windows, ropes, strict=True))
    layers = alike(((window, rope, not normed or index > 0) for index, (window, rope) in kinds), layer)
    first = sizes.position_offset
    stack = EncoderStack(
        Embedding(sizes.vocab_size, hidden, name="embed_tokens"),
        layers,
        table("embed_positions", None if first is None else sizes.positions + first),
        table("embed_types", sizes.types),
        norm("embed_norm") if sizes.embedding_norm else None,
        norm("final_norm") if sizes.pre_norm else None,
        first or 0,
        name="model",
    )
    made = None
    if head is not None:
        made = ClassificationHead(
            Output({"head.dense": hidden}, hidden, head.dense_bias),
            norm("head.norm") if head.norm else None,
            Output({"score": head.labels}, hidden, True),
            head.activation,
        )
    labels = 0 if head is None else head.labels
    return EncoderBlueprint(Encoder(stack, made), Pooled(sizes.positions, labels, sizes.pooled_by))


def _layer(
    sizes: EncoderSizes, norm: Callable[[str], Norm], window: int | None, rope: RopeConfig | None, is_normed: bool
) -> EncoderLayer:
    """`is_normed`: whether there is a norm for attention alone."""
    hidden, inner, dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.heads * dim, sizes.kv_heads * dim
    qkv = {"qkv_proj": queries + 2 * keys} if sizes.fused else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    up = {"gate_proj": inner, "up_proj": inner} if sizes.activation in GATED else {"up_proj": inner}
    if sizes.fused and sizes.activation in GATED:
        up = {"gate_up_proj": 2 * inner}
    attention = Attention(
        Linear(qkv, hidden, sizes.attention_bias),
        Linear({"o_proj": hidden}, queries, sizes.attention_bias),
        sizes.heads,
        sizes.kv_heads,
        dim,
        dim**-0.5,
        window=window,
        bidirectional=True,
        rope=rope,
        name="self_attn",
    )
    up_proj, down_proj = Linear(up, hidden, sizes.mlp_bias), Linear({"down_proj": hidden}, inner, sizes.down_bias)
    mlp = MLP(up_proj, down_proj, sizes.activation, name="mlp")
    before = norm("attention_norm") if is_normed else None
    return EncoderLayer(before, attention, norm("mlp_norm"), mlp, sizes.pre_norm)


def head_sizes(config: Mapping[str, Any], *, stated: bool = False) -> tuple[int, int]:
    """(heads, dimensions of each). stated: whether a field may state the latter.

    Raises UnsupportedConfig if the hidden size cannot be divided among the heads.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if stated and config.get("head_dim") is not None:
        return heads, int(config["head_dim"])
    if hidden % heads:
        raise UnsupportedConfig(f"a hidden size of {hidden} cannot be divided among {heads} heads")
    return heads, hidden // heads


def gated(config: Mapping[str, Any], field: str) -> Activation:
    """The activation of an MLP with a gate. Raises UnsupportedConfig for one that is not implemented."""
    if config[field] not in _GATED:
        raise UnsupportedConfig(f"{field} = {config[field]!r} is not implemented natively")
    return _GATED[config[field]]


def label_count(config: Mapping[str, Any]) -> int:
    """How many labels a classification head has, by the fields that transformers reads."""
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return int(config.get("num_labels") or DEFAULT_LABELS)
