"""Imports the layers of an architecture, and with them torch."""

from __future__ import annotations

import importlib

from srv.models.architectures import third_party
from srv.models.architectures.registry import BUILT_IN, find
from srv.models.base import NativeModel
from srv.models.layers.rope_config import UnsupportedConfig


def load_layers(name: str) -> type[NativeModel]:
    """The class of the layers of a native architecture. Raises PluginError if those of a third party are faulty."""
    architecture = find(name)
    if architecture is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    try:
        found = _import(architecture.layers)
    except Exception as error:
        if name in BUILT_IN:
            raise
        reason = f"importing {architecture.layers} raised {type(error).__name__}: {error}"
        owner = third_party.provider(architecture)
        raise third_party.error_in(owner, f"{name}.layers", reason, "import_failed") from error
    if not (isinstance(found, type) and issubclass(found, NativeModel)):
        reason = f"{architecture.layers} is not a subclass of srv.models.base.NativeModel"
        raise third_party.error_in(third_party.provider(architecture), f"{name}.layers", reason)
    return found


def _import(target: str) -> object:
    module, _, attribute = target.partition(":")
    found: object = getattr(importlib.import_module(module), attribute)
    return found
