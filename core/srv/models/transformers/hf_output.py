"""Both ends of a class of transformers: its first position, and what it computes after its last norm.

Owns the output layer with the float32 sums of a platform's op. Must not know attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from srv.models.layers.context import BuildContext
from srv.models.layers.linear import FLOAT32_OP
from srv.models.transformers.hf_quantized import QuantizedLinear


class Float32Output(nn.Module):
    """hidden [N, hidden size] -> logits float32 [N, vocabulary]; the weight stays that of the layer it replaces."""

    def __init__(self, weight: nn.Parameter, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = weight
        self._product = product

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product(hidden, self.weight)


def keep_float32(model: Any, context: BuildContext) -> None:
    """Replace the output layer of a `...ForCausalLM`, if it is a plain one of 16 bits and the platform has the op.

    A quantized one stays, and its layer returns float32 where it can. A `ClassHead` that was made before keeps the
    class's own layer.
    """
    layer = model.get_output_embeddings()
    if isinstance(layer, QuantizedLinear):
        layer.layer.keep_float32(context)
    if type(layer) is not nn.Linear or layer.bias is not None or layer.weight.dtype == torch.float32:
        return
    sizes = {"inputs": layer.in_features, "outputs": layer.out_features}
    if context.offers(FLOAT32_OP, **sizes):
        model.set_output_embeddings(Float32Output(layer.weight, context.bind(FLOAT32_OP, **sizes)))


class _Given(nn.Module):
    """Stands in for the body of a class, and returns hidden states that were computed before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # not a part of this module
        self.hidden = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> _Computed:
        return _Computed(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_body"][0], name)


class _Computed(BaseModelOutputWithPast):  # type: ignore[misc]
    """The output of a body; what was not computed is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class ClassHead:
    """What a `...ForCausalLM` computes from the hidden states of its body, often more than an output layer."""

    def __init__(self, model: Any) -> None:
        body = body_of(model)
        self._given = _Given(body)
        self._model = copy.copy(model)
        self._model._modules = {
            name: self._given if module is body else module for name, module in model._modules.items()
        }

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The head of a class; None if its body is not a module of its own."""
        body = body_of(model)
        return cls(model) if any(module is body for module in model._modules.values()) else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden size] -> logits [N, vocabulary]."""
        self._given.hidden = hidden.unsqueeze(0)
        tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        scores: Tensor = self._model(input_ids=tokens, use_cache=False).logits[0]
        return scores


def body_of(model: Any) -> Any:
    """The module of a class that computes its last hidden states."""
    body = model.base_model
    return getattr(model, "model", model) if body is model else body


def first_position(model: Any) -> int:
    """The position of a sequence's first token: RoBERTa and its kin count from the id of the padding token."""
    embeddings = getattr(body_of(model), "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    return padding + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") and padding is not None else 0
