"""The configuration of encoders: BERT and those that differ from it in their norms, MLPs and positions.

Torch-free. Owns the sizes, and the switches in which these differ. An encoder attends in both directions, so that a
prompt is computed in one step, without a KV pool. Must not know how a layer computes: `encoder_layers` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.architectures.architecture import DividedSizes
from srv.models.architectures.layer_norm_config import MLPKind
from srv.models.architectures.op_uses import GATED_SILU, LAYER_NORM, NORM, ROTARY, SILU, Matrix, ModelOps, OpUse
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig
from srv.specs import AttentionLayer

LAYERS = "srv.models.architectures.encoder_layers:Encoder"
DEFAULT_LABELS = 2  # of transformers
GATED_GELU = "gelu_gated"
# By the names that configurations have for activations of MLPs with a gate.
GATED: dict[str, str] = {"gelu": GATED_GELU, "silu": GATED_SILU, "swish": GATED_SILU}
_OWN = "torch's operator"


class HeadConfig(NamedTuple):
    """A classification head: dense layer, activation, an optional norm, and the layer with the labels.

    `activation`: of the dense layer: "tanh", or one of `ACTIVATIONS`.
    """

    labels: int
    activation: str = "tanh"
    dense_bias: bool = True
    norm: bool = False


class EncoderConfig(NamedTuple):
    """Sizes and switches of an encoder.

    `windows`: of each layer, how far a token sees in both directions (`srv.specs.AttentionLayer.window`), or None.
    `positions`: the most tokens of a prompt. `activation`: of the MLP; those of `GATED` have a gate. `pre_norm`: norms
    precede attention and MLP, and one follows the last layer; otherwise they follow the additions to the residual.
    `embedding_norm`: a norm follows the embeddings; with `pre_norm`, it is the one before the first attention. `rms`:
    norms are RMSNorms, without a bias. `fused`: checkpoints have queries, keys and values in one matrix, and so the
    gate and the up projection. `mlp_bias`, `down_bias`: of the matrices before the down projection, and of that one.
    `position_offset`: the row of the first token in the table of positions; None if layers rotate queries and keys
    instead, by `ropes`, of which each layer has one. `types`: the kinds of tokens, 0 without a table of them. `head`:
    None without a classification head. `pooled_by`: see `PooledConfig`.
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
    activation: MLPKind | str
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

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def labels(self) -> int:
        return 0 if self.head is None else self.head.labels

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        dim = self.head_dim
        return tuple(
            AttentionLayer(index, self.heads, self.kv_heads, dim, dim**-0.5, window=window, bidirectional=True)
            for index, window in enumerate(self.windows)
        )

    @property
    def divided(self) -> DividedSizes | None:
        return None

    def of_rank(self, ranks: int) -> EncoderConfig:
        return self

    @property
    def matrices_before_down(self) -> int:
        return 2 if self.activation in GATED.values() else 1

    @property
    def projection_params(self) -> int:
        mlp = (1 + self.matrices_before_down) * self.intermediate_size
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden_size * (attention + mlp)

    @property
    def parameters(self) -> int:
        hidden, norm = self.hidden_size, self.hidden_size * (1 + self.norm_bias)
        table = 0 if self.position_offset is None else self.positions + self.position_offset
        biases = ((self.heads + 2 * self.kv_heads) * self.head_dim + hidden) * self.attention_bias
        biases += self.intermediate_size * self.matrices_before_down * self.mlp_bias + hidden * self.down_bias
        norms = 2 * self.layers + 1  # beside those of layers, one follows the embeddings or the last layer
        embeddings = (self.vocab_size + table + self.types) * hidden
        return embeddings + self.projection_params + self.layers * biases + norms * norm + self._head_parameters

    @property
    def _head_parameters(self) -> int:
        if self.head is None:
            return 0
        hidden, labels = self.hidden_size, self.head.labels
        norm = hidden * (1 + self.norm_bias) * self.head.norm
        return hidden * (hidden + self.head.dense_bias) + norm + labels * (hidden + 1)

    def attention_outputs(self, prefix: str) -> dict[str, int]:
        """The outputs of the matrices of queries, keys and values, by their names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused:
            return {f"{prefix}.qkv_proj": queries + 2 * keys}
        return {f"{prefix}.q_proj": queries, f"{prefix}.k_proj": keys, f"{prefix}.v_proj": keys}

    def mlp_outputs(self, prefix: str) -> dict[str, int]:
        """The outputs of the matrices before the down projection, by their names."""
        inner, gated = self.intermediate_size, self.matrices_before_down == 2
        if gated and self.fused:
            return {f"{prefix}.gate_up_proj": 2 * inner}
        return {f"{prefix}.{name}_proj": inner for name in (("gate", "up") if gated else ("up",))}

    def model_ops(self, dtype: str) -> ModelOps:
        norm = {"dim": self.hidden_size}
        ops = [OpUse(NORM, norm) if self.rms else _torch(LAYER_NORM, self.hidden_size)]
        if self.ropes:
            ops.append(OpUse(ROTARY, {"head_dim": self.head_dim, "rotary_dim": self.ropes[0].rotary_dim}))
        if self.activation == GATED_SILU:
            ops.append(OpUse(SILU, {"dim": self.intermediate_size}))
        else:
            ops.append(_torch("gelu" if self.activation == GATED_GELU else self.activation, self.intermediate_size))
        return ModelOps(tuple(ops), self._matrices())

    def _matrices(self) -> tuple[Matrix, ...]:
        hidden, inner = self.hidden_size, self.intermediate_size
        found = [Matrix(("model.embed_tokens",), hidden, self.vocab_size, embedding=True)]
        for index in range(self.layers):
            attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            qkv, up = self.attention_outputs(attention), self.mlp_outputs(mlp)
            found.append(Matrix(tuple(qkv), hidden, sum(qkv.values()), parts=tuple(qkv.values())))
            found.append(Matrix((f"{attention}.o_proj",), self.heads * self.head_dim, hidden))
            found.append(Matrix(tuple(up), hidden, sum(up.values()), parts=tuple(up.values())))
            found.append(Matrix((f"{mlp}.down_proj",), inner, hidden))
        if self.head is not None:
            found.append(Matrix(("head.dense",), hidden, hidden))
            found.append(Matrix(("score",), hidden, self.head.labels))
        return tuple(found)


def _torch(op: str, dim: int) -> OpUse:
    return OpUse(op, {"dim": dim}, own=_OWN, always_own=True)


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


def gated(config: Mapping[str, Any], field: str) -> str:
    """The activation of an MLP with a gate. Raises UnsupportedConfig for one that is not implemented."""
    if config[field] not in GATED:
        raise UnsupportedConfig(f"{field} = {config[field]!r} is not implemented natively")
    return GATED[config[field]]


def label_count(config: Mapping[str, Any]) -> int:
    """How many labels a classification head has, by the fields that transformers reads."""
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return int(config.get("num_labels") or DEFAULT_LABELS)
