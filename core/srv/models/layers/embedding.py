"""Token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.layers.context import BuildContext


class TokenEmbedding(nn.Module, ABC):
    """Looks up one row per token: int64 [T] -> [T, hidden] of the model's dtype.

    `name`: the name that checkpoints give to the layer, without ".weight".
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """The tensors that a loader fills, by their names in the checkpoint."""


class Embedding(TokenEmbedding):
    """Rows of `weight` [vocab, hidden], in the model's dtype."""

    def __init__(self, context: BuildContext, name: str, vocab: int, hidden: int) -> None:
        super().__init__(name)
        self.weight = context.empty(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}
