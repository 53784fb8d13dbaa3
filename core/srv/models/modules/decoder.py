"""A decoder: embedding, layers, last norm and output, made from its blueprint.

    tokens ─ embedding ─ [positions, norm] ─ layer ─ … ─ layer ─ norm ─ output

Must not know files, devices or the KV pool. Sharded over ranks, each rank holds some heads, some of the intermediate
size and some of the vocabulary: the embedding is an all-reduce, and the logits are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from srv.dist.agreement import StepShape
from srv.errors import InternalError
from srv.models import blueprint
from srv.models.base import ForwardContext, ModelInputs, NativeModel, torch_dtype
from srv.models.blueprint.gemma import LayerInputs as LayerInputPart
from srv.models.blueprint.gemma import StreamMean as StreamMeanPart
from srv.models.blueprint.gemma import StreamProjections as StreamProjectionPart
from srv.models.blueprint.streams import StreamMixing, StreamStart
from srv.models.checkpoints.slices import Slice
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import joined
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.attention import Attention
from srv.models.modules.decoder_layer import DecoderLayer, SinglePartLayer, StackLayer, make_layer, unless_one
from srv.models.modules.gemma import LayerInputs, StreamMean, StreamProjections
from srv.models.modules.latent_attention import LatentAttention
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place, PositionTables
from srv.models.modules.reading_attention import ReadingAttention
from srv.models.modules.replicas import ReplicaRows
from srv.models.modules.streams import StreamMixer
from srv.models.modules.weights import prepare_loaded, weight_slices, weight_views
from srv.specs import AttentionLayer

_SINUSOIDAL_BASE = 10000.0


class Decoder(NativeModel):
    """A whole model, or one rank's part. `lookup`: the embedding, over all ranks."""

    def __init__(self, tree: blueprint.Decoder, factory: LayerFactory, context_length: int) -> None:
        super().__init__(tree, factory, context_length)
        part, context, output = tree.stack, factory.context, tree.output
        top = Place(factory, PositionTables(context_length, context.device))
        place = top.within(part)
        rows, hidden = part.embedding.rows, part.embedding.size
        embedding, tied = factory.over("embedding"), output is None or output.tied
        vocabulary = embedding if tied else factory.over("vocabulary")
        self.embedding = embedding.embedding(place.within(part.embedding).prefix, rows, hidden)
        self.factor = _embedding_factor(part, context.dtype)
        self.first = nn.ModuleList(_first(each, place) for each in part.before if not isinstance(each, LayerInputPart))
        own = (LayerInputs(each, place) for each in part.before if isinstance(each, LayerInputPart))
        self.layer_inputs = next(own, None)
        self.stack = tuple(self._made(part.layers[index], place, index) for index in range(len(part.layers)))
        self.layers = nn.ModuleList(self.stack)
        self.skips = part.skips
        self.skip_points = frozenset(index for skip in part.skips for index in (skip.source, skip.target))
        *mixing, norm = part.after
        self.stream_head = next((_stream_head(each, place) for each in mixing), None)
        self.keeps = any(isinstance(each, ReadingAttention) for each in self.modules())
        assert isinstance(norm, blueprint.Norm)
        self.norm = make_norm(norm, place)
        self.generates = output is not None
        if output is None or output.tied:
            self.lm_head = embedding.tied_lm_head("lm_head", self.embedding)
        else:
            self.lm_head = top.over("vocabulary").linear(output)
        self.lm_head.keep_float32(context)
        self.output_bias = None if tree.output_bias is None else OutputBias(tree.output_bias, vocabulary)
        self.logits_divisor, self.logits_soft_cap = unless_one(tree.logits_divisor), tree.logits_soft_cap
        self.score: Projection | None = None if tree.head is None else top.linear(tree.head)
        self.communicator = vocabulary.context.communicator
        self.lookup: nn.Module = self.embedding
        if embedding.context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, embedding.context.communicator)
        # The ranks of all replicas divide the output layer, unless each replica does for itself.
        shared = vocabulary.context.group.size > embedding.context.group.size
        self.replica_rows = ReplicaRows.of(top) if shared else None

    def _made(self, part: blueprint.Part, place: Place, index: int) -> StackLayer:
        layer: StackLayer
        place = place.of_layer(index)
        if isinstance(part, blueprint.SinglePartLayer):
            layer = SinglePartLayer(part, place)
        else:
            assert isinstance(part, blueprint.Layer)
            layer = self.make_layer(part, place)
        place.context.layer_made(index, layer)
        return layer

    def make_layer(self, part: blueprint.Layer, place: Place) -> DecoderLayer:
        """Subclasses override it to make layers of their own."""
        return make_layer(part, place)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(each.layer for each in self.modules() if isinstance(each, Attention | LatentAttention))

    def up_projections(self) -> Iterator[tuple[AttentionLayer, Tensor]]:
        for each in self.modules():
            if isinstance(each, LatentAttention):
                yield each.layer, each.up_projection

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self.factor is not None:
            residual = residual * self.factor
        if self.layer_inputs is not None:
            inputs = inputs._replace(layers=self.layer_inputs.forward(inputs.tokens, residual))
        if self.keeps:
            context = context._replace(kept={})
        for part in self.first:
            residual = part(residual, inputs)
        x: Tensor | None = None
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.stack):
            if index in self.skip_points:
                x, residual = None, self._skipped(index, residual if x is None else residual + x, kept)
            x, residual = layer.forward(x, residual, inputs, context)
        if self.stream_head is not None:
            residual = self.stream_head(residual)
        return joined(self.norm, x, residual)[0]

    def _skipped(self, index: int, residual: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """The residual that a layer reads. `kept`: those before layers that later ones read again, by their numbers."""
        kept[index] = residual
        for skip in self.skips:
            if skip.target == index:
                residual = kept[skip.source] * skip.share + residual * (1 - skip.share)
        return residual

    def logits(self, hidden: Tensor, shape: StepShape | None = None) -> Tensor:
        """Without an output layer, those of the embedding matrix: they mean nothing, and no request is given them."""
        if self.replica_rows is None:
            return self._logits(hidden)
        return self.replica_rows.run(self._logits, hidden, None if shape is None else shape.outputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden).float()  # changes nothing where the kernel returns its float32 sums
        if self.output_bias is not None:
            logits = logits + self.output_bias.values
        if self.logits_divisor is not None:
            logits = logits / self.logits_divisor
        if self.logits_soft_cap is not None:
            logits = torch.tanh(logits / self.logits_soft_cap) * self.logits_soft_cap
        if self.communicator is None:
            return logits
        gathered = self.communicator.all_gather(logits)  # [ranks, N, vocab of one rank]
        return gathered.transpose(0, 1).reshape(len(logits), -1)

    def classify(self, pooled: Tensor) -> Tensor:
        return super().classify(pooled) if self.score is None else self.score.kernel(pooled).float()

    def marked_modules(self) -> dict[str, nn.Module]:
        """The embedding, the parts of each layer, and the output layer, by the names of the checkpoint.

        Norms are not among them: most are computed together with an addition to the residual.
        """
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup}
        for layer in self.stack:
            marked |= layer.marked
        if self.score is not None:
            marked["score"] = self.score
        return {**marked, "lm_head": self.lm_head} if self.generates else marked

    def weight_views(self) -> dict[str, Tensor]:
        return weight_views(self)

    def weight_slices(self) -> dict[str, Slice]:
        return weight_slices(self)

    def prepare_loaded(self) -> None:
        prepare_loaded(self)


class OutputBias(WeightModule):
    """The bias of the output layer, of which each rank has a part."""

    def __init__(self, part: blueprint.Tensors, factory: LayerFactory) -> None:
        super().__init__()
        ((self.name, (vocab,)),) = part.shapes.items()
        self._vocab = factory.local_vocab(vocab)
        self.values = factory.context.empty(self._vocab.end - self._vocab.begin)

    def weight_views(self) -> dict[str, Tensor]:
        return {self.name: self.values}

    def weight_slices(self) -> dict[str, Slice]:
        return {self.name: self._vocab}


class LearnedPositions(WeightModule):
    """Adds the rows of a table, by their positions."""

    def __init__(self, part: blueprint.Table, place: Place) -> None:
        super().__init__()
        self.name, self.number = place.within(part).prefix, part.first
        self.weight = place.context.empty(part.rows, part.size)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x + self.weight[self.number :].index_select(0, inputs.positions)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}


class AddedSinusoids(nn.Module):
    def __init__(self, part: blueprint.Sinusoids, place: Place) -> None:
        super().__init__()
        self.rows: Tensor
        rows = _sinusoidal(place.tables.positions, part.size, part.first)
        self.register_buffer("rows", rows.to(place.context.device, place.context.dtype), persistent=False)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x + self.rows.index_select(0, inputs.positions)


class EmbeddingNorm(nn.Module):
    def __init__(self, part: blueprint.Norm, place: Place) -> None:
        super().__init__()
        self.norm = make_norm(part, place)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.norm.forward(x)


class Streams(nn.Module):
    """[T, hidden] -> [T, number, hidden]."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.number, -1)


def _first(part: blueprint.Part, place: Place) -> nn.Module:
    """What follows the embedding."""
    match part:
        case blueprint.Table():
            return LearnedPositions(part, place)
        case blueprint.Sinusoids():
            return AddedSinusoids(part, place)
        case blueprint.Norm():
            return EmbeddingNorm(part, place)
        case StreamStart():
            return Streams(part.number)
        case StreamProjectionPart():
            return StreamProjections(part, place)
    raise InternalError(f"{type(part).__name__} cannot follow an embedding")


def _stream_head(part: blueprint.Part, place: Place) -> nn.Module:
    """What precedes the last norm: [T, streams, hidden] -> [T, hidden]."""
    match part:
        case StreamMixing():
            return StreamMixer(part, place)
        case StreamMeanPart():
            return StreamMean(part, place)
    raise InternalError(f"{type(part).__name__} cannot precede the last norm")


def _embedding_factor(part: blueprint.DecoderStack, dtype: torch.dtype) -> float | None:
    """Rounded as the models were trained: in bfloat16, 55.4 is 55.5."""
    if part.factor == 1.0 or part.factor_dtype is None:
        return unless_one(part.factor)
    return torch.tensor(part.factor).to(torch_dtype(part.factor_dtype) if part.factor_dtype else dtype).item()


def _sinusoidal(positions: int, dim: int, first: int) -> Tensor:
    """float32 [positions, dim]: sines, then cosines, of position `first` and those that follow.

    The frequencies fall from 1 to 1 / 10000, as in tensor2tensor: Vaswani et al. 2017 (arXiv:1706.03762) use slightly
    other ones.
    """
    half = dim // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(_SINUSOIDAL_BASE) / (half - 1)))
    angles = torch.outer(torch.arange(first, first + positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)
