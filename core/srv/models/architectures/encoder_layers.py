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
from srv.models import blueprint
from srv.models.architectures import encoder_config
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
    "gelu_gated": lambda x: _gelu_and_mul(x),
}


def _linear(factory: LayerFactory, part: blueprint.Linear, prefix: str) -> Projection:
    outputs = {blueprint.below(prefix, name): size for name, size in part.outputs.items()}
    return factory.linear(outputs, part.inputs, part.bias)


def _table(context: BuildContext, part: blueprint.Table | None) -> nn.Parameter | None:
    return None if part is None else context.empty(part.rows, part.size)


def _norm(context: BuildContext, part: blueprint.Norm) -> Norm:
    if part.rms:
        return RMSNorm(context, part.size, part.eps, with_residual=False)
    return LayerNorm(context, part.size, part.eps, part.bias)


class EncoderAttention(nn.Module):
    """Attention in both directions. Queries, keys and values come from one matrix, which some checkpoints divide."""

    def __init__(self, part: blueprint.Attention, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__()
        context = factory.context
        self.layer = part.layer(index)
        self.qkv_proj = _linear(factory, part.qkv, prefix)
        self.o_proj = _linear(factory, part.output, prefix)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        if part.rope is not None:
            sizes = {"head_dim": part.head_dim, "rotary_dim": part.rope.rotary_dim}
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

    def __init__(self, part: blueprint.MLP, factory: LayerFactory, prefix: str) -> None:
        super().__init__()
        self.up_proj = _linear(factory, part.up, prefix)
        self.down_proj = _linear(factory, part.down, prefix)
        if part.activation == "silu_gated":
            self._activate: Callable[[Tensor], Tensor] = factory.context.bind("silu_and_mul", dim=part.inner)
            return
        self._activate = _ACTIVATIONS[part.activation]
        op = part.activation.removesuffix("_gated")
        factory.context.ops.note_own(op, OpArgs(factory.context.dtype, {"dim": part.inner}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.kernel(self._activate(self.up_proj.kernel(x)))


def _gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate).mul_(up)


class EncoderLayer(nn.Module):
    """One layer. The first one has no norm before attention if that of the embeddings takes its place."""

    def __init__(self, part: encoder_config.EncoderLayer, factory: LayerFactory, index: int) -> None:
        super().__init__()
        self.prefix, self.pre_norm = f"model.layers.{index}", part.pre_norm
        self.attention = EncoderAttention(part.attention, factory, f"{self.prefix}.self_attn", index)
        self.mlp = EncoderMLP(part.mlp, factory, f"{self.prefix}.mlp")
        self.attention_norm = None if part.attention_norm is None else _norm(factory.context, part.attention_norm)
        self.mlp_norm = _norm(factory.context, part.mlp_norm)

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

    def __init__(self, part: encoder_config.ClassificationHead, factory: LayerFactory) -> None:
        super().__init__()
        self.dense = _linear(factory, part.dense, "")
        self.norm = None if part.norm is None else _norm(factory.context, part.norm)
        self.score = _linear(factory, part.score, "")
        self._activate = _ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = self._activate(self.dense.kernel(x))
        return self.score.kernel(x if self.norm is None else self.norm.forward(x)).float()


class Encoder(NativeModel):
    """A whole model. `embed_positions`, `embed_types`: tables of rows [hidden]; None in models without them."""

    def __init__(self, config: encoder_config.EncoderBlueprint, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length)
        part, context, head = config.tree.stack, factory.context, config.tree.head
        self.embedding = factory.embedding("model.embed_tokens", part.embedding.rows, part.embedding.size)
        self.offset = part.first_position
        self.embed_positions = (
            None if part.positions is None else context.empty(part.positions.rows, part.positions.size)
        )
        self.embed_types = None if part.types is None else context.empty(part.types.rows, part.types.size)
        self.embed_norm = None if part.embedding_norm is None else _norm(context, part.embedding_norm)
        self.stack = tuple(EncoderLayer(layer, factory, index) for index, layer in enumerate(part.layers))
        self.layers = nn.ModuleList(self.stack)
        self.final_norm = None if part.final_norm is None else _norm(context, part.final_norm)
        self.head = None if head is None else ClassificationHead(head, factory)
        ropes = [layer.attention.rope for layer in part.layers]
        self._cos_sin = _tables(ropes, context_length, context.device)

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


def _tables(ropes: Sequence[RopeConfig | None], positions: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """The table of each layer; layers with equal embeddings share one."""
    made: list[tuple[RopeConfig, Tensor]] = []
    for rope in ropes:
        if rope is not None and all(rope != other for other, _ in made):
            made.append((rope, cos_sin_table(rope, positions).to(device)))
    return tuple(next((table for other, table in made if other == rope), None) for rope in ropes)
