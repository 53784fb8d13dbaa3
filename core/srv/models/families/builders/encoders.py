"""Encoders: BERT and those that differ from it in their norms, MLPs and positions.

Torch-free. Owns how their parts are built, and the fields of labels. An encoder attends in both directions, so
that a prompt is computed in one step, without a KV pool. Must not know how a layer computes:
`srv.models.modules.encoder` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from srv.models.blueprint import (
    GATED,
    MLP,
    Activation,
    Attention,
    Embedding,
    Linear,
    Norm,
    Output,
    Table,
    alike,
)
from srv.models.blueprint.encoders import ClassificationHead, Encoder, EncoderLayer, EncoderStack, RelativeBias
from srv.models.checkpoints.slices import Section
from srv.models.families.architecture import Pooled
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.layers.rope_config import RopeConfig
from srv.models.unsupported import UnsupportedConfig

LAYERS = "srv.models.modules.encoder:Encoder"
DEFAULT_LABELS = 2  # of transformers
POOLER = ("pooler.dense.weight", "pooler.dense.bias")  # of a prediction that embeddings do not use
MASKED_HEAD = (  # of RoBERTa's prediction of masked tokens
    "lm_head.bias",
    *(f"lm_head.{name}.{each}" for name in ("decoder", "dense", "layer_norm") for each in ("weight", "bias")),
)
# By the names that configurations have for activations of MLPs with a gate.
_GATED: dict[str, Activation] = {"gelu": "gelu_gated", "silu": "silu_gated", "swish": "silu_gated"}

Tree: TypeAlias = Callable[[Mapping[str, Any]], Encoder]


def encoder(
    sizes: Sizes,
    attention: Attention | Sequence[Attention],
    mlp: MLP,
    norm: Callable[[str], Norm],
    *,
    pre_norm: bool = False,
    embedding_norm: bool = True,
    positions: int = 0,
    first_position: int = 0,
    types: int = 0,
    bias: RelativeBias | None = None,
) -> Encoder:
    """An encoder without a head. `norm(name)`: that of hidden states.

    `pre_norm`: norms precede attention and MLP, and one follows the last layer; otherwise they follow the additions to
    the residual. `embedding_norm`: a norm follows the embeddings; with `pre_norm`, it is the one before the first
    attention. `positions`: the rows of the table of positions, `first_position` that of the first token, `types` the
    kinds of tokens; 0 without such a table. `bias`: of distances, in all layers.
    """

    def layer(kind: tuple[Attention, bool]) -> EncoderLayer:
        attention, is_normed = kind
        return EncoderLayer(norm("attention_norm") if is_normed else None, attention, norm("mlp_norm"), mlp, pre_norm)

    def table(name: str, rows: int) -> Table | None:
        return Table(rows, sizes.hidden_size, name=name) if rows else None

    normed = pre_norm and embedding_norm
    attentions = enumerate(parts.of_layers(sizes, attention))
    stack = EncoderStack(
        Embedding(sizes.vocab_size, sizes.hidden_size, name="embed_tokens"),
        alike(((each, not normed or index > 0) for index, each in attentions), layer),
        table("embed_positions", positions),
        table("embed_types", types),
        norm("embed_norm") if embedding_norm else None,
        norm("final_norm") if pre_norm else None,
        first_position,
        bias,
        name="model",
    )
    return Encoder(stack, None)


def attention(
    sizes: Sizes,
    *,
    bias: bool = True,
    rope: RopeConfig | None = None,
    window: int | None = None,
    fused: bool = False,
    relative_bias: bool = False,
) -> Attention:
    """Attention in both directions. `rope`: None for that of `sizes`. `window`: how far a token sees.

    `fused`: checkpoints have queries, keys and values in one matrix.
    """
    hidden, dim = sizes.hidden_size, sizes.head_dim
    queries, keys = sizes.heads * dim, sizes.kv_heads * dim
    parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    qkv = Linear(dict(parts), hidden, bias, split="out", unit=dim)
    if fused:
        sections = (tuple(Section(size, dim) for _, size in parts),)
        qkv = Linear({"qkv_proj": queries + 2 * keys}, hidden, bias, split="out", sections=sections)
    return Attention(
        qkv,
        Linear({"o_proj": hidden}, queries, bias, split="in"),
        sizes.heads,
        sizes.kv_heads,
        dim,
        dim**-0.5,
        window=window,
        bidirectional=True,
        rope=rope or sizes.rope,
        relative_bias=relative_bias,
        name="self_attn",
    )


def mlp(sizes: Sizes, activation: Activation, *, bias: bool = True, down_bias: bool = True, fused: bool = False) -> MLP:
    """`bias`: of the matrices before the down projection. `fused`: checkpoints have the gate and the up projection in
    one matrix."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    names = ("gate_proj", "up_proj") if activation in GATED else ("up_proj",)
    up = Linear(dict.fromkeys(names, inner), hidden, bias, split="out")
    if fused:
        up = Linear({"gate_up_proj": 2 * inner}, hidden, bias, split="out", sections=((Section(inner),) * 2,))
    return MLP(up, Linear({"down_proj": hidden}, inner, down_bias, split="in"), activation, name="mlp")


def layer_norm(sizes: Sizes, *, bias: bool = True) -> Callable[[str], Norm]:
    """The norm of hidden states, by its name."""
    return lambda name: Norm(sizes.hidden_size, sizes.norm_eps, rms=False, bias=bias, name=name)


def with_head(
    encoder: Encoder, labels: int, activation: Activation = "tanh", *, bias: bool = True, norm: Norm | None = None
) -> Encoder:
    """With a classification head. `activation`, `bias`, `norm`: of its dense layer."""
    hidden = encoder.stack.embedding.size
    dense, score = Output({"head.dense": hidden}, hidden, bias), Output({"score": labels}, hidden, True)
    return replace(encoder, head=ClassificationHead(dense, norm, score, activation))


def classifier_of(tree: Tree, activation: Activation = "tanh") -> Tree:
    """From the fields of a configuration to the encoder with a head."""
    return lambda config: with_head(tree(config), label_count(config), activation)


def mean_pooled(positions: Callable[[Mapping[str, Any]], int]) -> Callable[[Mapping[str, Any]], Pooled]:
    """What an encoder without a head says of its results. `positions(config)`: the most tokens of a prompt."""
    return lambda config: Pooled(positions(config), 0, "mean")


def cls_pooled(positions: Callable[[Mapping[str, Any]], int]) -> Callable[[Mapping[str, Any]], Pooled]:
    """Likewise of one with a head that reads the first token."""
    return lambda config: Pooled(positions(config), label_count(config), "cls")


def encoder_sizes(config: Mapping[str, Any], heads: int, head_dim: int, norm_eps: float) -> Sizes:
    """Those that all encoders state alike, with as many key heads as heads and without a rotary embedding."""
    return Sizes(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        norm_eps=norm_eps,
        tied_embeddings=False,
        layers=int(config["num_hidden_layers"]),
        rope=None,
    )


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
