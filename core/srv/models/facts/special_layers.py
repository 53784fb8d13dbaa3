"""The experts and recurrent layers of a model, as its blueprint describes them, before it is built. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.kept import kept_per_object
from srv.models import derive
from srv.models.blueprint import MoE
from srv.models.blueprint.gemma import AltUp, LayerInputs
from srv.models.blueprint.recurrent import WithStates
from srv.models.blueprint.streams import StreamMixing
from srv.models.families.trees import native_tree_of_model
from srv.models.layers.recurrent_sizes import RecurrentSizes
from srv.specs import ModelFacts


def mixture(model: ModelFacts, values: Mapping[str, Any]) -> MoE | None:
    """That of the whole model; None if it has none, or if transformers computes it. `values`: set by the user."""
    return None if values.get("model_impl") == "transformers" else special_layers(model).mixture


class SpecialLayers(NamedTuple):
    """Layers that need more temporary memory than attention and an MLP do; None of which a model has none.

    `streams`: what mixes those of the residual, if it has several. `inputs`: those of single layers.
    """

    mixture: MoE | None = None
    recurrent: RecurrentSizes | None = None
    streams: StreamMixing | AltUp | None = None
    inputs: LayerInputs | None = None


@kept_per_object
def special_layers(model: ModelFacts) -> SpecialLayers:
    """Those of the native layers, which are about as large if transformers computes them."""
    tree = native_tree_of_model(model)
    if isinstance(tree, str):
        return SpecialLayers()
    recurrent = (part.sizes for part in derive.distinct(tree) if isinstance(part, WithStates))
    streams = derive.find(tree, StreamMixing) or derive.find(tree, AltUp)
    return SpecialLayers(derive.find(tree, MoE), next(recurrent, None), streams, derive.find(tree, LayerInputs))
