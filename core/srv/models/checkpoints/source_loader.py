"""Loads weights from the sources of other distributions, tensor by tensor.

Owns what is checked of them: the names and shapes before anything is read, and each tensor that is read. Must not know
architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeGuard

from torch import Tensor

from srv.errors import ModelError, PluginError
from srv.models.checkpoints.filling import NO_SLICES, Meter, Progress
from srv.models.checkpoints.matching import cut, fill, needed_tensors
from srv.models.checkpoints.slices import Slices
from srv.models.checkpoints.storage import StorageFormat
from srv.models.checkpoints.text_names import EMBEDDING, HEAD
from srv.models.checkpoints.third_party import LOADERS, described
from srv.models.checkpoints.weight_source import WeightSource
from srv.models.options import TIED
from srv.specs import ModelFacts

_REMEDY = "Update the package of the loader, or load the weights of the model that it was written for"


def load_from_sources(
    names: Sequence[str],
    facts: ModelFacts,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    storage: StorageFormat | None = None,
    slices: Slices = NO_SLICES,
    rename: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Fill every tensor from the loaders of these names, which together give all of them.

    `storage`, `slices`, `rename`: as of `load_safetensors`. Raises ModelError: missing_tensors, unexpected_tensors,
    shape_mismatch, dtype_mismatch; PluginError for a loader that is faulty.
    """
    stored_as, where = storage or StorageFormat(), f"weights given by {described(names)}"
    with ExitStack() as stack:
        sources: dict[str, WeightSource] = {}
        for name in names:
            sources[name] = _open(name, facts)
            stack.callback(LOADERS.call, name, "close", sources[name].close)
        shapes, owners = _offered(sources, where)
        needed = needed_tensors(where, shapes, weight_views, stored_as, slices, rename, _REMEDY)
        meter = Meter(sum(view.nbytes for view in weight_views.values()), progress)
        for stored, name in needed.items():
            read = _read(owners[stored], sources[owners[stored]], stored, shapes[stored])
            for target, tensor in stored_as.convert(name, read).items():
                if target not in weight_views:
                    continue  # it is on another rank
                fill(where, target, weight_views[target], cut(tensor, slices.get(target)), _REMEDY)
                meter.add(weight_views[target].nbytes, target)
        if facts.generates and HEAD not in weight_views:
            offered = next((each for each in shapes if rename(each) == HEAD), None)
            if offered is not None:
                read = _read(owners[offered], sources[owners[offered]], offered, shapes[offered])
                _check_tied(where, read, weight_views, slices)


def _check_tied(where: str, head: Tensor, weight_views: Mapping[str, Tensor], slices: Slices) -> None:
    """Refuse an output layer that differs from the embedding in whose place the configuration ties it."""
    embedding = weight_views[EMBEDDING]
    own = cut(head, slices.get(EMBEDDING)).to(embedding.device, embedding.dtype)
    if own.shape != embedding.shape or not own.equal(embedding):
        reason = f"{HEAD} differs from {EMBEDDING}, but the configuration ties them"
        remedy = f"""Serve both with --json-model-override-args '{{"{TIED}": false}}'"""
        raise ModelError("unexpected_tensors", where, reason, remedy)


def _open(name: str, facts: ModelFacts) -> WeightSource:
    loader = LOADERS.find(name)
    if loader is None:
        raise ModelError("no_weights", facts.path, f"no installed package has a weight loader {name}", "Install it")
    make = LOADERS.import_class(name, "target", loader.target, WeightSource, built_in=False)
    return LOADERS.call(name, "target", make, facts)


def _offered(sources: Mapping[str, WeightSource], where: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shape of each tensor, and the name of its loader."""
    shapes: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    for name, source in sources.items():
        for tensor, shape in LOADERS.call(name, "shapes", _listed, source).items():
            if not isinstance(tensor, str) or not _is_shape(shape):
                raise _fault(name, "shapes", f"has {tensor!r}: {shape!r}, not a name and a tuple of sizes")
            if tensor in owners:
                reason = f"{tensor} is given by {owners[tensor]} and by {name}"
                raise ModelError("unexpected_tensors", where, reason, "Name one loader for each tensor")
            shapes[tensor], owners[tensor] = shape, name
    return shapes, owners


def _listed(source: WeightSource) -> dict[Any, Any]:
    return dict(source.shapes())


def _is_shape(shape: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)


def _read(name: str, source: WeightSource, tensor: str, shape: tuple[int, ...]) -> Tensor:
    found: object = LOADERS.call(name, "read", source.read, tensor)
    if not isinstance(found, Tensor):
        raise _fault(name, "read", f"returned {type(found).__name__} for {tensor}, not a tensor")
    if tuple(found.shape) != shape:
        raise _fault(name, "read", f"returned the shape {list(found.shape)} for {tensor}, not {list(shape)}")
    if not found.is_floating_point() or found.itemsize == 1:
        dtype = str(found.dtype).removeprefix("torch.")
        raise _fault(name, "read", f"returned {dtype} for {tensor}, not floats of 16 bits or more")
    return found.detach()


def _fault(name: str, member: str, reason: str) -> PluginError:
    return LOADERS.error_in(LOADERS.provider(name), f"{name}.{member}", reason)
