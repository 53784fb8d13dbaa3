"""Loads weights from safetensors files, one or many, which are memory-mapped and copied tensor by tensor.

Owns the loop over a checkpoint's files. Must not know architectures, except for two kinds of stored tensors that no
model reads, and the prefix that checkpoints without an output layer leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from srv.errors import ModelError
from srv.models.formats.filling import NO_SLICES, OTHER_CHECKPOINT, Meter, Progress, check_names
from srv.models.formats.safetensors_header import DOWNLOAD_AGAIN, Checkpoint, read_checkpoint
from srv.models.formats.slices import Slice, Slices
from srv.models.formats.storage import StorageFormat

_DECODER = "model."  # prefix of the decoder's weights in a causal language model


def load_safetensors(
    folder: Path,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    storage: StorageFormat | None = None,
    slices: Slices = NO_SLICES,
) -> None:
    """Fill every tensor from the folder's files, converting floats to the tensor's dtype.

    `storage` converts the tensors of quantized checkpoints. `slices`: the parts of stored tensors that belong to this
    rank; only they are read. `storage` must leave sliced tensors as they are. Raises ModelError: no_weights,
    missing_tensors, unexpected_tensors, shape_mismatch, dtype_mismatch, truncated, damaged.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint is None:
        remedy = "Download the weights, or use --load-format dummy for random ones"
        raise ModelError("no_weights", str(folder), "the folder has no safetensors file", remedy)
    storage = storage or StorageFormat()
    names = _model_names(checkpoint, weight_views)
    shapes = storage.shapes({names[stored]: tensor.shape for stored, tensor in checkpoint.tensors.items()})
    unused = _unused_names(names, weight_views) | storage.unused(shapes.keys() - weight_views.keys())
    check_names(str(folder), weight_views, shapes, unused, slices)
    needed = {stored: name for stored, name in names.items() if name in weight_views}
    meter = Meter(sum(checkpoint.tensors[stored].size for stored in needed), progress)
    for path, stored_names in checkpoint.files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for stored in (stored for stored in stored_names if stored in needed):
                    read = _read(file, stored, slices.get(needed[stored]))
                    for target, tensor in storage.convert(needed[stored], read).items():
                        _fill(path, target, weight_views[target], tensor)
                    meter.add(checkpoint.tensors[stored].size, stored)
        except SafetensorError as error:
            raise ModelError("damaged", str(path), f"its weights cannot be read ({error})", DOWNLOAD_AGAIN) from error


def _read(file: Any, stored: str, part: Slice | None) -> Tensor:
    if part is None:
        tensor: Tensor = file.get_tensor(stored)
        return tensor
    lazy = file.get_slice(stored)
    read: Tensor = lazy[part.begin : part.end] if part.axis == 0 else lazy[:, part.begin : part.end]
    return read


def _model_names(checkpoint: Checkpoint, weight_views: Mapping[str, Tensor]) -> dict[str, str]:
    """The model's name of each stored tensor.

    Checkpoints of embedding models are often saved without the output layer (transformers' `AutoModel`), and so
    without the prefix of the decoder: "layers.0..." instead of "model.layers.0...".
    """
    bare = not any(name.startswith(_DECODER) for name in checkpoint.tensors) and any(
        _DECODER + name in weight_views for name in checkpoint.tensors
    )
    return {name: _DECODER + name if bare and name not in weight_views else name for name in checkpoint.tensors}


def _fill(path: Path, name: str, view: Tensor, stored: Tensor) -> None:
    if stored.dtype != view.dtype and not (stored.is_floating_point() and view.is_floating_point()):
        reason = f"tensor {name} is stored as {_dtype_name(stored)}, but its layer computes with {_dtype_name(view)}"
        raise ModelError("dtype_mismatch", str(path), reason, OTHER_CHECKPOINT)
    view.copy_(stored)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unused_names(names: Mapping[str, str], weight_views: Mapping[str, Tensor]) -> set[str]:
    """Stored tensors that are skipped: RoPE frequencies of old checkpoints, and the copy of a tied output layer."""
    tied = {"lm_head.weight"} - weight_views.keys()
    return {name for name in names.values() if name.endswith("rotary_emb.inv_freq")} | tied
