"""The interface of a model: the class `CausalLM`, its inputs, and what its layers receive beside them.

Owns the seam between models and the rest of the engine. A model must not know pages, rows or the KV pool: it calls
`context.attend` once per layer, and everything else is a function of its inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from srv.dist.agreement import StepShape
from srv.errors import InternalError
from srv.models.checkpoints.slices import Slice
from srv.models.layers.experts import ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.states import StatesOf, no_states
from srv.specs import AttentionLayer

# attend(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads, D]; in a layer of latent
# attention, k are the compressed vectors and v the shared rotary keys (`srv.platform.latent.LatentAttentionBackend`)
Attend: TypeAlias = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]


class ModelInputs(NamedTuple):
    """The inputs of one forward pass: the tokens of all rows, concatenated.

    tokens: int64 [T], token ids. positions: int64 [T], the position of each token in its sequence. types: int64 [T],
    to which text of a pair each token belongs; None: all tokens have type 0. layers: [T, layers, size], what each
    layer adds of its own, in models that have such inputs: the model computes them.
    """

    tokens: Tensor
    positions: Tensor
    types: Tensor | None = None
    layers: Tensor | None = None

    def of_layer(self, number: int) -> Tensor:
        """[T, size], of the layer with that number."""
        if self.layers is None:
            raise InternalError(f"layer {number} asks for an input of its own, but the model computed none")
        return self.layers[:, number]


class ForwardContext(NamedTuple):
    """What the layers of one forward pass need beside their inputs. Passed from layer to layer, never global.

    states: the states of recurrent layers, of models that have such layers. kept: the keys and values of the pass by
    the numbers of their layers, of layers with whose keys higher ones attend; None in models without. shape: of the
    step, on which replicas have agreed that compute it together; None for one replica.
    """

    attend: Attend
    states: StatesOf = no_states
    kept: dict[int, tuple[Tensor, Tensor]] | None = None
    shape: StepShape | None = None

    @property
    def tokens(self) -> int | None:
        """To which replicas pad their tokens."""
        return None if self.shape is None else self.shape.tokens


class CausalLM(nn.Module, ABC):
    """A causal language model for inference: its weights are loaded, and it computes no gradients."""

    @abstractmethod
    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Hidden states after the last norm: [T, hidden] of the model's dtype."""

    @abstractmethod
    def logits(self, hidden: Tensor, shape: StepShape | None = None) -> Tensor:
        """Logits over the vocabulary: [N, hidden] -> float32 [N, vocab]. `shape`: as `ForwardContext.shape`.

        The last product should end in float32: rounded to bfloat16, the best logits of some positions are equal.
        """

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits over the labels of the classification head: [N, hidden] -> float32 [N, labels].

        InternalError for a model without one.
        """
        raise InternalError("a model without a classification head was asked for the logits of labels")

    @property
    @abstractmethod
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """The attention of each layer, in the order of the layers, with the heads of this rank."""

    def up_projections(self) -> Iterator[tuple[AttentionLayer, Tensor]]:
        """Each layer of latent attention with its up-projection, [heads, key_dim + value_dim, latent_dim]."""
        return iter(())

    def marked_modules(self) -> dict[str, nn.Module]:
        """The modules that profilers show, by the names that they show (`srv.worker.markers`)."""
        return {name: module for name, module in self.named_modules() if name}

    def loaded_bytes(self) -> int:
        """Bytes of the weights on this rank; meaningful until the platform repacks them."""
        return sum(parameter.nbytes for parameter in self.parameters())


class NativeModel(CausalLM):
    """The native layers of an architecture, or one rank's part of them, made from its blueprint (`tree`).

    `factory` makes the layers with weights, which are uninitialised until a loader has filled `weight_views`.
    """

    @abstractmethod
    def __init__(self, tree: Any, factory: LayerFactory, context_length: int) -> None:
        super().__init__()

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """Views of all weights by their names in Hugging Face checkpoints; those of fused layers are slices."""

    @abstractmethod
    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that `weight_views` holds; of those that are not whole."""

    def loaded_bytes(self) -> int:
        return sum(view.nbytes for view in self.weight_views().values())

    def prepare_loaded(self) -> None:
        """Compute what the layers derive from their weights. Called once, after loading."""

    def validate_loaded(self) -> str | None:
        """Check the loaded weights: the reason why a layer cannot compute with them, or None."""
        layers = (module for module in self.modules() if isinstance(module, (Projection, ExpertWeights)))
        return next((reason for each in layers if (reason := each.validate_loaded()) is not None), None)


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
