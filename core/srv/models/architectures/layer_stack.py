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

from torch import Tensor, nn

from srv.models.architectures.attention import Attention
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.base import NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm
from srv.specs import AttentionLayer


class StackedLayer(nn.Module, ABC):
    """One layer, with attention, a gated MLP and norms. `prefix`: that of its weights' names in the checkpoint."""

    prefix: str
    attention: Attention
    mlp: GatedMLP

    @abstractmethod
    def layer_norms(self) -> Mapping[str, RMSNorm]:
        """The norms of the layer, without those of queries and keys, by the names of the checkpoint."""

    def weight_views(self) -> dict[str, Tensor]:
        """Views of this layer's weights, by their names in the checkpoint."""
        norms = {
            **self.layer_norms(),
            "self_attn.q_norm": self.attention.q_norm,
            "self_attn.k_norm": self.attention.k_norm,
        }
        views: dict[str, Tensor] = {
            f"{self.prefix}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None
        }
        for projection in self._projections():
            views |= projection.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the views hold; of those that are not whole."""
        slices: dict[str, Slice] = {}
        for projection in self._projections():
            slices |= projection.weight_slices()
        return slices

    def _projections(self) -> tuple[Projection, ...]:
        attention, mlp = self.attention, self.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


Layer = TypeVar("Layer", bound=StackedLayer)


class LayerStack(NativeModel, Generic[Layer]):
    """A whole model without its order of computation, or one rank's part. `make_layer(index)` makes its layers.

    `norm`: the class of the last norm. `communicator`: None for one rank. `lookup`: the embedding, over all ranks.
    `logits_divisor`: None if logits are not divided.
    """

    logits_divisor: float | None = None

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        context_length: int,
        make_layer: Callable[[int], Layer],
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__(config, factory, context_length)
        context = factory.context
        self.embedding = factory.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.stack = tuple(make_layer(index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = norm(context, config.hidden_size, config.norm_eps)
        if config.tied_embeddings:
            self.lm_head = factory.tied_lm_head("lm_head", self.embedding)
        else:
            self.lm_head = factory.linear({"lm_head": config.vocab_size}, config.hidden_size, False, split="out")
        self.communicator = context.communicator
        self.lookup: nn.Module = self.embedding
        if context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, context.communicator)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.attention.layer for layer in self.stack)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self.logits_divisor is not None:
            logits = logits / self.logits_divisor
        if self.communicator is None:
            return logits
        gathered = self.communicator.all_gather(logits)  # [ranks, N, vocab of one rank]
        return gathered.transpose(0, 1).reshape(len(logits), -1)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.embedding.weight_views() | {"model.norm.weight": self.norm.weight} | self.lm_head.weight_views()
        for layer in self.stack:
            views |= layer.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        slices = self.embedding.weight_slices() | self.lm_head.weight_slices()
        for layer in self.stack:
            slices |= layer.weight_slices()
        return slices
