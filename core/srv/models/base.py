"""The interface of a model: the class `CausalLM`, its inputs, and what its layers receive beside them.

Owns the seam between models and the rest of the engine. A model must not know pages, rows or the KV pool: it calls
`context.attend` once per layer, and everything else is a function of its inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from srv.platform.interface import AttentionLayer

# attend(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads, D]
Attend: TypeAlias = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]


class ModelInputs(NamedTuple):
    """The inputs of one forward pass: the tokens of all rows, concatenated.

    tokens: int64 [T], token ids. positions: int64 [T], the position of each token in its sequence.
    """

    tokens: Tensor
    positions: Tensor


class ForwardContext(NamedTuple):
    """What the layers of one forward pass need beside their inputs. Passed from layer to layer, never global."""

    attend: Attend


class CausalLM(nn.Module, ABC):
    """A causal language model for inference: its weights are loaded, and it computes no gradients."""

    @abstractmethod
    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Hidden states after the last norm: [T, hidden] of the model's dtype."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: [N, hidden] -> [N, vocab], of the model's dtype."""

    def loaded_bytes(self) -> int:
        """Bytes of the weights on this rank; meaningful until the platform repacks them."""
        return sum(parameter.nbytes for parameter in self.parameters())


def inference_ready(model: CausalLM) -> CausalLM:
    """Switch to evaluation mode and freeze every parameter."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16". Raises ValueError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
