"""Which stored tensors fill those of a model, and copies them there. Must not know where they are stored.

Owns what is skipped: RoPE frequencies, which no model reads, the copy of a tied output layer, and keys of layers that
read those of lower ones; and the prefix that checkpoints without an output layer leave out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.filling import OTHER_CHECKPOINT, check_names
from srv.models.checkpoints.slices import Slice, Slices
from srv.models.checkpoints.storage import StorageFormat
from srv.models.checkpoints.text_names import HEAD, KEYS_AND_VALUES, QUERIES, ROTARY

_DECODER = "model."  # prefix of the decoder's weights in a causal language model


def needed_tensors(
    source: str,
    stored: Mapping[str, tuple[int, ...]],
    weight_views: Mapping[str, Tensor],
    storage: StorageFormat,
    slices: Slices,
    rename: Callable[[str], str | None],
    remedy: str = OTHER_CHECKPOINT,
) -> dict[str, str]:
    """The model's name of each stored tensor that a layer needs, by its stored name.

    `source`: what errors call the place of the tensors. Raises ModelError: missing_tensors, unexpected_tensors,
    shape_mismatch.
    """
    names = _model_names(stored, weight_views, rename)
    shapes = storage.shapes({name: stored[each] for each, name in names.items()})
    unused = _unused_names(names, weight_views) | storage.unused(shapes.keys() - weight_views.keys())
    check_names(source, weight_views, shapes, unused, slices, remedy)
    return {each: name for each, name in names.items() if weight_views.keys() & set(storage.parts(name))}


def cut(tensor: Tensor, part: Slice | None) -> Tensor:
    """A view of a part of a tensor; a copy, if it has several ranges."""
    if part is None:
        return tensor
    ranges = [tensor.narrow(part.axis, begin, end - begin) for begin, end in part.ranges]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, part.axis)


def fill(source: str, name: str, view: Tensor, stored: Tensor, remedy: str = OTHER_CHECKPOINT) -> None:
    """Copy a tensor of the same shape, converting floats. Raises ModelError (dtype_mismatch)."""
    widened = stored.is_floating_point() and view.is_floating_point() and min(stored.itemsize, view.itemsize) > 1
    if stored.dtype != view.dtype and not widened:
        reason = f"tensor {name} is stored as {_dtype_name(stored)}, but its layer computes with {_dtype_name(view)}"
        raise ModelError("dtype_mismatch", source, reason, remedy)
    view.copy_(stored)


def _model_names(
    stored: Collection[str], weight_views: Mapping[str, Tensor], rename: Callable[[str], str | None]
) -> dict[str, str]:
    """The model's name of each stored tensor that is not skipped.

    Checkpoints of embedding models are often saved without the output layer (transformers' `AutoModel`), and so
    without the prefix of the decoder: "layers.0..." instead of "model.layers.0...".
    """
    names = {each: name for each in stored if (name := rename(each)) is not None}
    bare = not any(name.startswith(_DECODER) for name in names.values()) and any(
        _DECODER + name in weight_views for name in names.values()
    )
    return {each: _DECODER + name if bare and name not in weight_views else name for each, name in names.items()}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unused_names(names: Mapping[str, str], weight_views: Mapping[str, Tensor]) -> set[str]:
    """Stored tensors that are skipped: RoPE frequencies of old checkpoints, the copy of a tied output layer, and keys
    and values of layers that have queries alone.
    """
    tied = {HEAD} - weight_views.keys()
    reading = _layers(QUERIES, weight_views) - _layers(KEYS_AND_VALUES, weight_views)
    unread = {name for name in names.values() if (found := KEYS_AND_VALUES.match(name)) and found[1] in reading}
    return {name for name in names.values() if name.endswith(ROTARY)} | tied | unread


def _layers(pattern: re.Pattern[str], names: Collection[str]) -> set[str]:
    """The numbers of the layers that have such a tensor."""
    return {found[1] for name in names if (found := pattern.match(name))}
