"""What the runner knows of a model: the class `CausalLM` and the callable it hands to it for attention.

Owns the seam between models and the rest of the engine. A model must not know pages, rows or the KV pool:
it asks `attend` for attention, once a layer, and everything else is a function of its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from srv.platform.interface import AttentionLayer

# attend(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads, D]
Attend: TypeAlias = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
# progress(total bytes, bytes done, name of the tensor or file just done)
Progress: TypeAlias = Callable[[int, int, str], None]


class CausalLM(nn.Module, ABC):
    """A causal language model in inference: weights loaded, no gradients.

    `attention_layers`: the layers that call `attend`, in the order of their `index`.
    """

    attention_layers: tuple[AttentionLayer, ...]

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm.

        tokens, positions: int64 [T], rows laid one after the other. Returns [T, hidden] of the model's dtype.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary: [N, hidden] -> [N, vocab], of the model's dtype."""


def inference_ready(model: CausalLM) -> CausalLM:
    """Switch to evaluation and freeze every parameter."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype
