"""The factory of layers with weight matrices: architectures must not know how a checkpoint stores its weights."""

from __future__ import annotations

from collections.abc import Mapping

from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import Embedding, TokenEmbedding
from srv.models.layers.linear import Linear, Projection


class LayerFactory:
    """Makes linear layers and embeddings with unquantized weights of the model's dtype, for a loader to fill.

    Subclasses make the layers of quantized checkpoints.
    """

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def linear(self, shards: Mapping[str, int], inputs: int, bias: bool) -> Projection:
        """One linear layer that fuses several of the checkpoint; `shards`: their names, and the outputs of each."""
        return Linear(self.context, shards, inputs, bias)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        return Embedding(self.context, name, vocab, hidden)

    def tied_lm_head(self, name: str, embedding: TokenEmbedding) -> Projection:
        """The output layer of a model with tied embeddings: it shares the embedding's weight."""
        if not isinstance(embedding, Embedding):
            raise TypeError(f"{type(embedding).__name__} has no unquantized weight that the output layer could share")
        vocab, hidden = embedding.weight.shape
        return Linear(self.context, {name: vocab}, hidden, bias=False, weight=embedding.weight)
