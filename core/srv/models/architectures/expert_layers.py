"""The experts and recurrent layers of a model, as its configuration describes them, before it is built. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.architectures.architecture import NativeConfig
from srv.models.architectures.registry import native_or_reason
from srv.models.layers.moe_config import MoEConfig
from srv.models.layers.recurrent_sizes import RecurrentSizes
from srv.models.layers.stream_sizes import StreamSizes
from srv.specs import ModelFacts


def mixture(model: ModelFacts, values: Mapping[str, Any]) -> MoEConfig | None:
    """That of the whole model; None if it has none, or if transformers computes it. `values`: set by the user."""
    if values.get("model_impl") == "transformers":
        return None
    native = native_or_reason(model.architecture, model.config)
    return None if isinstance(native, str) else mixture_of(native)  # a text: it runs through transformers


def mixture_of(config: NativeConfig | None) -> MoEConfig | None:
    """The mixture of a configuration, which has it as `moe`; None if it has none."""
    found = getattr(config, "moe", None)
    return found if isinstance(found, MoEConfig) else None


class SpecialLayers(NamedTuple):
    """Layers that need more temporary memory than attention and an MLP do; None of which a model has none.

    `streams`: those of the residual, if it has several.
    """

    mixture: MoEConfig | None = None
    recurrent: RecurrentSizes | None = None
    streams: StreamSizes | None = None


def special_layers(model: ModelFacts) -> SpecialLayers:
    """Those of the native layers, which are about as large if transformers computes them."""
    native = native_or_reason(model.architecture, model.config)
    if isinstance(native, str):
        return SpecialLayers()
    recurrent, streams = getattr(native, "recurrent", None), getattr(native, "streams", None)
    return SpecialLayers(
        mixture_of(native),
        recurrent if isinstance(recurrent, RecurrentSizes) else None,
        streams if isinstance(streams, StreamSizes) else None,
    )
