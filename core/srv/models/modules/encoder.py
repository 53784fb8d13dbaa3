"""The layers of encoders, with norms after the additions to the residual, or before the layers.

    after   ─ embeddings ─ norm ─┬─ attention ─(+)─ norm ─┬─ MLP ─(+)─ norm ─ …
                                 └─────────────┘          └───────┘

    before  ─ embeddings ─[norm]─┬─ [norm] ─ attention ─(+)─┬─ norm ─ MLP ─(+)─ … ─ norm
                                 └──────── residual ────────┘└── residual ──┘

Owns the order of computation and the names of the weights, from which those of checkpoints differ
(`srv.models.checkpoints.rules`). All tokens of a prompt are rows of one step. Sharded over ranks, each rank has some
heads, some of the intermediate size and some of the vocabulary; norms, other tables and heads are on every rank.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from srv.dist.agreement import StepShape
from srv.errors import InternalError
from srv.models import blueprint
from srv.models.base import ForwardContext, ModelInputs, NativeModel
from srv.models.blueprint import encoders
from srv.models.checkpoints.slices import Slice
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.attention import Attention
from srv.models.modules.feed_forward import ACTIVATIONS, MLP
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place, PositionTables
from srv.models.modules.weights import prepare_loaded, weight_slices, weight_views
from srv.platform.interface import Communicator
from srv.specs import AttentionLayer

_MOST_DISTANT = 128  # tokens, from which on all distances have one bucket


class EncoderLayer(nn.Module):
    """One layer. The first one has no norm before attention if that of the embeddings takes its place."""

    def __init__(self, part: encoders.EncoderLayer, place: Place) -> None:
        super().__init__()
        self.prefix, self.pre_norm = place.prefix, part.pre_norm
        heads = place.over("heads")
        self.attention = Attention(part.attention, heads.within(part.attention))
        self.mlp = MLP(part.mlp, place.within(part.mlp))
        self._of_heads, self._of_all = heads.context.communicator, place.context.communicator
        self.attention_norm = None if part.attention_norm is None else make_norm(part.attention_norm, place)
        self.mlp_norm = make_norm(part.mlp_norm, place)

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden], the input of the next layer."""
        if self.pre_norm:
            normed = x if self.attention_norm is None else self.attention_norm.forward(x)
            x = x + _whole(self.attention.forward(normed, inputs, context), self._of_heads)
            return x + _whole(self.mlp.forward(self.mlp_norm.forward(x)), self._of_all)
        assert self.attention_norm is not None
        x = self.attention_norm.forward(_whole(self.attention.forward(x, inputs, context), self._of_heads) + x)
        return self.mlp_norm.forward(_whole(self.mlp.forward(x), self._of_all) + x)


def _whole(out: Tensor, communicator: Communicator | None) -> Tensor:
    """The sum over all ranks of the result of a part."""
    return out if communicator is None else communicator.all_reduce(out)


class ClassificationHead(nn.Module):
    """score(norm(activation(dense(x)))): [N, hidden] -> float32 [N, labels]. The norm is optional."""

    def __init__(self, part: encoders.ClassificationHead, place: Place) -> None:
        super().__init__()
        self.dense, self.score = place.linear(part.dense), place.linear(part.score)
        self.norm = None if part.norm is None else make_norm(part.norm, place)
        self._activate = ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = self._activate(self.dense.kernel(x))
        return self.score.kernel(x if self.norm is None else self.norm.forward(x)).float()


class Rows(WeightModule):
    """A table of rows [hidden], by number."""

    def __init__(self, part: blueprint.Table, place: Place) -> None:
        super().__init__()
        self.name, self.weight = place.within(part).prefix, place.context.empty(part.rows, part.size)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}


class RelativeBias(WeightModule):
    """A number per head for each bucket of distances, which are logarithms of great ones (Raffel et al. 2019,
    arXiv:1910.10683). The first half of the buckets is of keys up to the query, the other one of later keys.
    """

    def __init__(self, part: encoders.RelativeBias, place: Place) -> None:
        super().__init__()
        self.name, self.weight = place.within(part).prefix, place.context.empty(part.buckets, part.heads)
        self._own = slice(*place.context.group.share(part.heads))

    def values(self) -> tuple[tuple[float, ...], ...]:
        """As `AttentionLayer.bias_values`, of this rank's heads, once weights are loaded."""
        distances = torch.arange(-_MOST_DISTANT, _MOST_DISTANT + 1)
        half = len(self.weight) // 2
        exact, far = half // 2, distances.abs().clamp_min(1)
        scaled = torch.log(far.float() / exact) / math.log(_MOST_DISTANT / exact) * (half - exact)
        buckets = torch.where(far < exact, distances.abs(), (exact + scaled.long()).clamp_max(half - 1))
        buckets += half * (distances > 0)
        return tuple(map(tuple, self.weight.float().cpu()[buckets][:, self._own].T.tolist()))

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}


class Encoder(NativeModel):
    """A whole model. `positions`, `types`: tables of rows; None in models without them."""

    def __init__(self, tree: encoders.Encoder, factory: LayerFactory, context_length: int) -> None:
        super().__init__(tree, factory, context_length)
        part, top = tree.stack, Place(factory, PositionTables(context_length, factory.context.device))
        place = top.within(part)
        name = place.within(part.embedding).prefix
        vocabulary = factory.over("vocabulary")
        self.embedding = vocabulary.embedding(name, part.embedding.rows, part.embedding.size)
        self.lookup: nn.Module = self.embedding
        if vocabulary.context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, vocabulary.context.communicator)
        self.offset = part.first_position
        self.positions, self.types = (
            None if table is None else Rows(table, place) for table in (part.positions, part.types)
        )
        self.embed_norm = None if part.embedding_norm is None else make_norm(part.embedding_norm, place)
        self.stack = tuple(EncoderLayer(layer, place.of_layer(index)) for index, layer in enumerate(part.layers))
        self.layers = nn.ModuleList(self.stack)
        self.bias = None if part.bias is None else RelativeBias(part.bias, place)
        self.final_norm = None if part.final_norm is None else make_norm(part.final_norm, place)
        self.head = None if tree.head is None else ClassificationHead(tree.head, top)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.attention.layer for layer in self.stack)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x: Tensor = self.lookup(inputs.tokens)
        if self.types is not None:
            rows = self.types.weight
            x = x + (rows[0] if inputs.types is None or len(rows) == 1 else rows[inputs.types])
        if self.positions is not None:
            x = x + self.positions.weight[inputs.positions + self.offset]
        x = x if self.embed_norm is None else self.embed_norm.forward(x)
        for layer in self.stack:
            x = layer.forward(x, inputs, context)
        return x if self.final_norm is None else self.final_norm.forward(x)

    def logits(self, hidden: Tensor, shape: StepShape | None = None) -> Tensor:
        raise InternalError("an encoder was asked for the logits of tokens, which it does not have")

    def classify(self, pooled: Tensor) -> Tensor:
        return super().classify(pooled) if self.head is None else self.head.forward(pooled)

    def marked_modules(self) -> dict[str, nn.Module]:
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup}
        for layer in self.stack:
            marked |= {f"{layer.prefix}.self_attn": layer.attention, f"{layer.prefix}.mlp": layer.mlp}
        return marked if self.head is None else {**marked, "head": self.head}

    def weight_views(self) -> dict[str, Tensor]:
        return weight_views(self)

    def weight_slices(self) -> dict[str, Slice]:
        return weight_slices(self)

    def prepare_loaded(self) -> None:
        prepare_loaded(self)
        values = None if self.bias is None else self.bias.values()  # of this rank's heads
        for layer in self.stack if values is not None else ():
            layer.attention.layer = dataclasses.replace(layer.attention.layer, bias_values=values)
