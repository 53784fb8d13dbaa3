"""The configuration of encoders: BERT, RoBERTa and XLM-RoBERTa, and ModernBERT.

Torch-free. Owns the sizes, and the switches in which these differ. An encoder attends in both directions, so that a
prompt is computed in one step, without a KV pool. Must not know how a layer computes: `encoder_layers` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.architectures.architecture import DividedSizes
from srv.models.architectures.layer_norm_config import MLPKind
from srv.models.architectures.op_uses import LAYER_NORM, ROTARY, Matrix, ModelOps, OpUse
from srv.models.layers.rope_config import RopeConfig
from srv.specs import AttentionLayer

LAYERS = "srv.models.architectures.encoder_layers:Encoder"
DEFAULT_LABELS = 2  # of transformers
GATED_GELU = "gelu_gated"
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
    `positions`: the most tokens of a prompt. `activation`: of the MLP; "gelu_gated" has a gate. `pre_norm`: norms
    precede attention and MLP, the first one only the MLP, and one follows the last layer; otherwise they follow the
    additions to the residual. `position_offset`: the row of the first token in the table of positions; None if layers
    rotate queries and keys instead, by `ropes`, of which each layer has one. `types`: the kinds of tokens, 0 without
    a table of them. `head`: None without a classification head. `pooled_by`: see `PooledConfig`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    norm_eps: float
    windows: tuple[int | None, ...]
    positions: int
    activation: MLPKind | str
    pre_norm: bool = False
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    position_offset: int | None = 0
    ropes: tuple[RopeConfig, ...] = ()
    types: int = 2
    head: HeadConfig | None = None
    pooled_by: str = "mean"

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def labels(self) -> int:
        return 0 if self.head is None else self.head.labels

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        dim = self.head_dim
        return tuple(
            AttentionLayer(index, self.heads, self.heads, dim, dim**-0.5, window=window, bidirectional=True)
            for index, window in enumerate(self.windows)
        )

    @property
    def divided(self) -> DividedSizes | None:
        return None

    def of_rank(self, ranks: int) -> EncoderConfig:
        return self

    @property
    def matrices_before_down(self) -> int:
        return 2 if self.activation == GATED_GELU else 1

    @property
    def projection_params(self) -> int:
        mlp = (1 + self.matrices_before_down) * self.intermediate_size
        return self.layers * self.hidden_size * (4 * self.hidden_size + mlp)

    @property
    def parameters(self) -> int:
        hidden, norm = self.hidden_size, self.hidden_size * (1 + self.norm_bias)
        table = 0 if self.position_offset is None else self.positions + self.position_offset
        biases = 4 * hidden * self.attention_bias
        biases += (self.intermediate_size * self.matrices_before_down + hidden) * self.mlp_bias
        norms = 2 * self.layers + 1  # with that of the embeddings; before attention, the first layer has none
        embeddings = (self.vocab_size + table + self.types) * hidden
        return embeddings + self.projection_params + self.layers * biases + norms * norm + self._head_parameters

    @property
    def _head_parameters(self) -> int:
        if self.head is None:
            return 0
        hidden, labels = self.hidden_size, self.head.labels
        norm = hidden * (1 + self.norm_bias) * self.head.norm
        return hidden * (hidden + self.head.dense_bias) + norm + labels * (hidden + 1)

    def model_ops(self, dtype: str) -> ModelOps:
        ops = [_torch(LAYER_NORM, self.hidden_size)]
        if self.ropes:
            ops.append(OpUse(ROTARY, {"head_dim": self.head_dim, "rotary_dim": self.ropes[0].rotary_dim}))
        ops.append(_torch("gelu" if self.activation == GATED_GELU else self.activation, self.intermediate_size))
        return ModelOps(tuple(ops), self._matrices())

    def _matrices(self) -> tuple[Matrix, ...]:
        hidden, inner = self.hidden_size, self.intermediate_size
        found = [Matrix(("model.embed_tokens",), hidden, self.vocab_size, embedding=True)]
        for index in range(self.layers):
            attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            fused = bool(self.ropes)
            qkv = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
            found.append(Matrix(tuple(f"{attention}.{name}" for name in qkv), hidden, 3 * hidden))
            found.append(Matrix((f"{attention}.o_proj",), hidden, hidden))
            up = "gate_up_proj" if self.activation == GATED_GELU else "up_proj"
            found.append(Matrix((f"{mlp}.{up}",), hidden, self.matrices_before_down * inner))
            found.append(Matrix((f"{mlp}.down_proj",), inner, hidden))
        if self.head is not None:
            found.append(Matrix(("head.dense",), hidden, hidden))
            found.append(Matrix(("score",), hidden, self.head.labels))
        return tuple(found)


def _torch(op: str, dim: int) -> OpUse:
    return OpUse(op, {"dim": dim}, own=_OWN, always_own=True)


def label_count(config: Mapping[str, Any]) -> int:
    """How many labels a classification head has, by the fields that transformers reads."""
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return int(config.get("num_labels") or DEFAULT_LABELS)
