"""Imports the layers and the storage format of a quantization method, and with them torch."""

from __future__ import annotations

from collections.abc import Callable

from srv.errors import SrvError
from srv.models.checkpoints.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.quantization.layers.factory import SchemeLayers
from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.registry import BUILT_IN
from srv.quantization.third_party import METHODS
from srv.quantization.third_party_storage import GuardedStorage


def make_factory(method: QuantMethod, context: BuildContext, model: StoredModel) -> LayerFactory:
    """The factory of the layers of a model.

    Raises PluginError if that of a third party is faulty, and ModelError for damaged checkpoints.
    """
    if method.layers is None:
        assert method.schemes is not None  # checked where a method of another distribution is imported
        return SchemeLayers(context, method.schemes(model))
    built_in = method.name in BUILT_IN
    make: Callable[..., LayerFactory] = METHODS.import_class(
        method.name, "layers", method.layers, LayerFactory, built_in=built_in
    )
    if built_in:
        return make(context, model)
    return METHODS.call(method.name, "layers", make, context, model, expected=(SrvError,))


def make_storage(method: QuantMethod, model: StoredModel) -> StorageFormat:
    """The storage format of the checkpoint of a model. Raises PluginError and ModelError like `make_factory`."""
    if method.storage is None:
        return StorageFormat()
    built_in = method.name in BUILT_IN
    make: Callable[..., StorageFormat] = METHODS.import_class(
        method.name, "storage", method.storage, StorageFormat, built_in=built_in
    )
    if built_in:
        return make(model)
    inner = METHODS.call(method.name, "storage", make, model, expected=(SrvError,))
    return GuardedStorage(method.name, inner)
