"""What native decoders share whatever the order of computation in their layers: embedding, layers, last norm, output.

Owns the names that checkpoints give to these weights, and what ranks exchange before the first layer and after the
last.

Sharded over ranks, each rank holds some heads, some of the intermediate size and some of the vocabulary. o_proj and the
MLP then give partial sums, which two all-reduces per layer add up; the embedding is another one, and the logits are
gathered. Norms and the residual are the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from srv.models.architectures.attention import Attention
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.latent_attention import LatentAttention
from srv.models.base import NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP, PlainMLP
from srv.models.layers.moe import MoE, Weighted
from srv.models.layers.norm import Norm, RMSNorm
from srv.specs import AttentionLayer


class StackedLayer(nn.Module, ABC):
    """One layer, with attention, an MLP and norms. `prefix`: that of its weights' names in the checkpoint."""

    prefix: str
    attention: Attention | LatentAttention
    mlp: GatedMLP | PlainMLP | MoE

    @abstractmethod
    def layer_norms(self) -> Mapping[str, Norm]:
        """The norms of the layer, without those of queries and keys, by the names of the checkpoint."""

    def weight_views(self) -> dict[str, Tensor]:
        """Views of this layer's weights, by their names in the checkpoint."""
        views: dict[str, Tensor] = self.attention.weight_views(f"{self.prefix}.self_attn")
        for name, norm in self.layer_norms().items():
            views |= norm.weight_views(f"{self.prefix}.{name}")
        for projection in self._projections():
            views |= projection.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the views hold; of those that are not whole."""
        slices: dict[str, Slice] = self.attention.weight_slices(f"{self.prefix}.self_attn")
        for projection in self._projections():
            slices |= projection.weight_slices()
        return slices

    def _projections(self) -> tuple[Weighted, ...]:
        return *self.attention.projections, *self.mlp.projections


Layer = TypeVar("Layer", bound=StackedLayer)


class LayerStack(NativeModel, Generic[Layer]):
    """A whole model without its order of computation, or one rank's part. `make_layer(index)` makes its layers.

    `norm`: makes the last norm. `communicator`: None for one rank. `lookup`: the embedding, over all ranks.
    `logits_divisor`: None if logits are not divided. `logits_soft_cap`: as in `DecoderConfig`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        context_length: int,
        make_layer: Callable[[int], Layer],
        norm: Callable[[BuildContext, int, float], Norm] = RMSNorm,
    ) -> None:
        super().__init__(config, factory, context_length)
        context = factory.context
        self.embedding = factory.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.stack = tuple(_made(context, make_layer(index), index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = norm(context, config.hidden_size, config.norm_eps)
        if config.tied_embeddings:
            self.lm_head = factory.tied_lm_head("lm_head", self.embedding)
        else:
            self.lm_head = factory.linear({"lm_head": config.vocab_size}, config.hidden_size, False, split="out")
        self.lm_head.keep_float32(context)
        self.logits_divisor = None if config.logits_divisor == 1.0 else config.logits_divisor
        self.logits_soft_cap = config.logits_soft_cap
        self.communicator = context.communicator
        self.lookup: nn.Module = self.embedding
        if context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, context.communicator)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.attention.layer for layer in self.stack)

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks hold of an output."""
        return partial if self.communicator is None else self.communicator.all_reduce(partial)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.local_logits(hidden)
        if self.logits_divisor is not None:
            logits = logits / self.logits_divisor
        if self.logits_soft_cap is not None:
            logits = torch.tanh(logits / self.logits_soft_cap) * self.logits_soft_cap
        if self.communicator is None:
            return logits
        gathered = self.communicator.all_gather(logits)  # [ranks, N, vocab of one rank]
        return gathered.transpose(0, 1).reshape(len(logits), -1)

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Those over the vocabulary of this rank, float32 [N, vocab], before they are divided and capped."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()  # changes nothing where the kernel returns its float32 sums

    def prepare_loaded(self) -> None:
        for layer in self.stack:
            layer.attention.prepare_loaded()

    def marked_modules(self) -> dict[str, nn.Module]:
        """The embedding, attention and MLP of each layer, and the output layer, by the names of the checkpoint.

        Norms are not among them: most are computed together with an addition to the residual.
        """
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup, "lm_head": self.lm_head}
        for layer in self.stack:
            marked |= {f"{layer.prefix}.self_attn": layer.attention, f"{layer.prefix}.mlp": layer.mlp}
        return marked

    def weight_views(self) -> dict[str, Tensor]:
        views = self.embedding.weight_views() | self.norm.weight_views("model.norm") | self.lm_head.weight_views()
        for layer in self.stack:
            views |= layer.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        slices = self.embedding.weight_slices() | self.lm_head.weight_slices()
        for layer in self.stack:
            slices |= layer.weight_slices()
        return slices


def _made(context: BuildContext, layer: Layer, index: int) -> Layer:
    context.layer_made(index, layer)
    return layer
