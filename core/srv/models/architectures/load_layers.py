"""Imports the layers of an architecture, and with them torch."""

from __future__ import annotations

from typing import Any

from srv.models.architectures.registry import BUILT_IN, find
from srv.models.architectures.third_party import ARCHITECTURES
from srv.models.base import NativeModel
from srv.models.layers.rope_config import UnsupportedConfig


def load_layers(name: str) -> type[NativeModel]:
    """The class of the layers of a native architecture. Raises PluginError if those of a third party are faulty."""
    architecture = find(name)
    if architecture is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    base: Any = NativeModel  # abstract
    layers: type[NativeModel] = ARCHITECTURES.import_class(
        name, "layers", architecture.layers, base, built_in=name in BUILT_IN
    )
    return layers
