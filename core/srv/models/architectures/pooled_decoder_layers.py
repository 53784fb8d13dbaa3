"""A decoder with a classification head, or none, instead of an output layer; decoders with RMS norm share it."""

from __future__ import annotations

from torch import Tensor, nn

from srv.models.architectures.decoder import Decoder
from srv.models.architectures.pooled_decoder import PooledDecoderConfig
from srv.models.base import ForwardContext, ModelInputs, NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.factory import LayerFactory
from srv.specs import AttentionLayer


class PooledDecoder(NativeModel):
    """A whole model, or one rank's part of the decoder; every rank has the whole head."""

    def __init__(self, config: PooledDecoderConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length)
        self.decoder = Decoder(config.decoder, factory, context_length)
        self.score = (
            factory.linear({"score": config.labels}, config.decoder.hidden_size, False) if config.labels else None
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self.decoder.attention_layers

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self.decoder.forward(inputs, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Those of the embedding matrix, as with tied embeddings: they mean nothing, and no request is given them."""
        return self.decoder.logits(hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        return super().classify(pooled) if self.score is None else self.score.kernel(pooled).float()

    def marked_modules(self) -> dict[str, nn.Module]:
        marked = {name: module for name, module in self.decoder.marked_modules().items() if name != "lm_head"}
        return marked if self.score is None else {**marked, "score": self.score}

    def weight_views(self) -> dict[str, Tensor]:
        views = self.decoder.weight_views()
        return views if self.score is None else views | self.score.weight_views()

    def weight_slices(self) -> dict[str, Slice]:
        return self.decoder.weight_slices()
