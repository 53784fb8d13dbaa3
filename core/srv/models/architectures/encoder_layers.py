"""The layers of encoders, with norms after the additions to the residual, or before the layers.

    after   ─ embeddings ─ norm ─┬─ attention ─(+)─ norm ─┬─ MLP ─(+)─ norm ─ …
                                 └─────────────┘          └───────┘

    before  ─ embeddings ─[norm]─┬─ [norm] ─ attention ─(+)─┬─ norm ─ MLP ─(+)─ … ─ norm
                                 └──────── residual ────────┘└── residual ──┘

Owns the order of computation and the names of the weights, from which those of checkpoints differ
(`srv.models.formats.stored_weights`). All tokens of a prompt are rows of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.errors import InternalError
from srv.models.architectures.encoder_config import GATED_GELU, EncoderConfig, HeadConfig
from srv.models.architectures.op_uses import GATED_SILU
from srv.models.base import ForwardContext, ModelInputs, NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import LayerNorm, Norm, RMSNorm
from srv.models.layers.op_layer import TORCH
from srv.models.layers.rope import cos_sin_table
from srv.models.layers.rope_config import RopeConfig
from srv.platform.interface import OpArgs
from srv.specs import AttentionLayer

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class EncoderAttention(nn.Module):
    """Attention in both directions. Queries, keys and values come from one matrix, which some checkpoints divide."""

    def __init__(self, config: EncoderConfig, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__()
        hidden, context = config.hidden_size, factory.context
        self.layer = config.attention_layers[index]
        attended = self.layer.heads * self.layer.head_dim
        self.qkv_proj = factory.linear(config.attention_outputs(prefix), hidden, config.attention_bias)
        self.o_proj = factory.linear({f"{prefix}.o_proj": hidden}, attended, config.attention_bias)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        if config.ropes:
            sizes = {"head_dim": config.head_dim, "rotary_dim": config.ropes[index].rotary_dim}
            self._rotary = context.ops.bind("rotary", OpArgs(context.dtype, sizes))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor | None, context: ForwardContext) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden]."""
        heads, keys, dim = self.layer.heads, self.layer.kv_heads, self.layer.head_dim
        fused = self.qkv_proj.kernel(x).reshape(-1, heads + 2 * keys, dim)
        q, k, v = fused.split_with_sizes([heads, keys, keys], 1)
        if self._rotary is not None:
            q, k = self._rotary(q, k, cos_sin, positions)
        attended = context.attend(self.layer, q, k, v)
        return self.o_proj.kernel(attended.reshape(-1, heads * dim))


class EncoderMLP(nn.Module):
    """down(activation(up(x))); with a gate, down(activation(gate(x)) · up(x)). GELU is exact."""

    def __init__(self, config: EncoderConfig, factory: LayerFactory, prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.up_proj = factory.linear(config.mlp_outputs(prefix), hidden, config.mlp_bias)
        self.down_proj = factory.linear({f"{prefix}.down_proj": hidden}, inner, config.down_bias)
        if config.activation == GATED_SILU:
            self._activate: Callable[[Tensor], Tensor] = factory.context.bind("silu_and_mul", dim=inner)
            return
        is_gated = config.activation == GATED_GELU
        self._activate = _gelu_and_mul if is_gated else _ACTIVATIONS[config.activation]
        name = "gelu" if is_gated else config.activation
        factory.context.ops.note_own(name, OpArgs(factory.context.dtype, {"dim": inner}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.kernel(self._activate(self.up_proj.kernel(x)))


def _gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate).mul_(up)


class EncoderLayer(nn.Module):
    """One layer. The first one has no norm before attention if that of the embeddings takes its place."""

    def __init__(self, config: EncoderConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        self.prefix, self.pre_norm = f"model.layers.{index}", config.pre_norm
        self.attention = EncoderAttention(config, factory, f"{self.prefix}.self_attn", index)
        self.mlp = EncoderMLP(config, factory, f"{self.prefix}.mlp")
        normed = config.pre_norm and config.embedding_norm and index == 0
        self.attention_norm = None if normed else _norm(config, factory.context)
        self.mlp_norm = _norm(config, factory.context)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor | None, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden], the input of the next layer."""
        if self.pre_norm:
            normed = x if self.attention_norm is None else self.attention_norm.forward(x)
            x = x + self.attention.forward(normed, positions, cos_sin, context)
            return x + self.mlp.forward(self.mlp_norm.forward(x))
        assert self.attention_norm is not None
        x = self.attention_norm.forward(self.attention.forward(x, positions, cos_sin, context) + x)
        return self.mlp_norm.forward(self.mlp.forward(x) + x)

    def norms(self) -> dict[str, Norm]:
        found = {f"{self.prefix}.mlp_norm": self.mlp_norm}
        return found if self.attention_norm is None else {f"{self.prefix}.attention_norm": self.attention_norm, **found}


class ClassificationHead(nn.Module):
    """score(norm(activation(dense(x)))): [N, hidden] -> float32 [N, labels]. The norm is optional."""

    def __init__(self, config: EncoderConfig, head: HeadConfig, factory: LayerFactory) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = factory.linear({"head.dense": hidden}, hidden, head.dense_bias)
        self.norm = _norm(config, factory.context) if head.norm else None
        self.score = factory.linear({"score": head.labels}, hidden, True)
        self._activate = _ACTIVATIONS[head.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = self._activate(self.dense.kernel(x))
        return self.score.kernel(x if self.norm is None else self.norm.forward(x)).float()


class Encoder(NativeModel):
    """A whole model. `embed_positions`, `embed_types`: tables of rows [hidden]; None in models without them."""

    def __init__(self, config: EncoderConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length)
        context, hidden = factory.context, config.hidden_size
        self.embedding = factory.embedding("model.embed_tokens", config.vocab_size, hidden)
        self.offset = config.position_offset or 0
        self.embed_positions: nn.Parameter | None = None
        if config.position_offset is not None:
            self.embed_positions = context.empty(config.positions + config.position_offset, hidden)
        self.embed_types = context.empty(config.types, hidden) if config.types else None
        self.embed_norm = _norm(config, context) if config.embedding_norm else None
        self.stack = tuple(EncoderLayer(config, factory, index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.final_norm = _norm(config, context) if config.pre_norm else None
        self.head = None if config.head is None else ClassificationHead(config, config.head, factory)
        tables = _tables(config.ropes, context_length, context.device)
        self._cos_sin: tuple[Tensor | None, ...] = tables or (None,) * config.layers

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.attention.layer for layer in self.stack)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x: Tensor = self.embedding(inputs.tokens)
        if self.embed_types is not None:
            one_type = inputs.types is None or len(self.embed_types) == 1
            x = x + (self.embed_types[0] if one_type else self.embed_types[inputs.types])
        if self.embed_positions is not None:
            x = x + self.embed_positions[inputs.positions + self.offset]
        x = x if self.embed_norm is None else self.embed_norm.forward(x)
        for layer, cos_sin in zip(self.stack, self._cos_sin, strict=True):
            x = layer.forward(x, inputs.positions, cos_sin, context)
        return x if self.final_norm is None else self.final_norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        raise InternalError("an encoder was asked for the logits of tokens, which it does not have")

    def classify(self, pooled: Tensor) -> Tensor:
        return super().classify(pooled) if self.head is None else self.head.forward(pooled)

    def marked_modules(self) -> dict[str, nn.Module]:
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.embedding}
        for layer in self.stack:
            marked |= {f"{layer.prefix}.self_attn": layer.attention, f"{layer.prefix}.mlp": layer.mlp}
        return marked if self.head is None else {**marked, "head": self.head}

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for module in self.modules():
            if isinstance(module, Projection | TokenEmbedding):
                views |= module.weight_views()
        norms: dict[str, Norm] = {} if self.embed_norm is None else {"model.embed_norm": self.embed_norm}
        for layer in self.stack:
            norms |= layer.norms()
        if self.final_norm is not None:
            norms["model.final_norm"] = self.final_norm
        if self.head is not None and self.head.norm is not None:
            norms["head.norm"] = self.head.norm
        for name, norm in norms.items():
            views |= norm.weight_views(name)
        tables = {"model.embed_positions.weight": self.embed_positions, "model.embed_types.weight": self.embed_types}
        return views | {name: table for name, table in tables.items() if table is not None}

    def weight_slices(self) -> dict[str, Slice]:
        return {}


def _tables(ropes: Sequence[RopeConfig], positions: int, device: torch.device) -> tuple[Tensor, ...]:
    """The table of each layer; layers with equal embeddings share one."""
    made: list[tuple[RopeConfig, Tensor]] = []
    for rope in ropes:
        if all(rope != other for other, _ in made):
            made.append((rope, cos_sin_table(rope, positions).to(device)))
    return tuple(next(table for other, table in made if other == rope) for rope in ropes)


def _norm(config: EncoderConfig, context: BuildContext) -> Norm:
    if config.rms:
        return RMSNorm(context, config.hidden_size, config.norm_eps, with_residual=False)
    return LayerNorm(context, config.hidden_size, config.norm_eps, config.norm_bias)
