"""Loads weights from safetensors files, one or many, tensor by tensor.

Owns the loop over a checkpoint's files. Must not know architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.filling import NO_SLICES, Meter, Progress, own_threads
from srv.models.checkpoints.matching import cut, fill, needed_tensors
from srv.models.checkpoints.reading import MAPPED, Reading, for_each
from srv.models.checkpoints.safetensors_file import open_tensors
from srv.models.checkpoints.safetensors_header import read_checkpoint
from srv.models.checkpoints.slices import Slices
from srv.models.checkpoints.storage import StorageFormat


def load_safetensors(
    folder: Path,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    storage: StorageFormat | None = None,
    slices: Slices = NO_SLICES,
    rename: Callable[[str], str | None] = lambda name: name,
    reading: Reading = MAPPED,
) -> None:
    """Fill every tensor from the folder's files, converting floats to the tensor's dtype.

    `storage` converts tensors that are quantized, fused or in another order. `slices`: the parts of the model's tensors
    that belong to this rank; only they are read, unless `storage` needs whole tensors. Otherwise `storage` must not
    change the shape of a sliced tensor. `rename(stored)`: the model's name of a stored tensor, or None to skip it. The
    threads of `reading` convert tensors as well. Raises ModelError: no_weights, missing_tensors, unexpected_tensors,
    shape_mismatch, dtype_mismatch, truncated, damaged, unsupported_quantization; PluginError for the storage format of
    another distribution.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint is None:
        remedy = "Download the weights, or use --load-format dummy for random ones"
        raise ModelError("no_weights", str(folder), "the folder has no safetensors file", remedy)
    stored_as = storage or StorageFormat()
    shapes = {stored: tensor.shape for stored, tensor in checkpoint.tensors.items()}
    needed = needed_tensors(str(folder), shapes, weight_views, stored_as, slices, rename)
    meter = Meter(sum(checkpoint.tensors[stored].size for stored in needed), progress)
    paths = {stored: path for path, names in checkpoint.files.items() for stored in names if stored in needed}
    with own_threads(reading.threads), open_tensors(checkpoint, paths, mapped=reading.mapped) as opened:

        def load(stored: str) -> None:
            name, path = needed[stored], paths[stored]
            whole = stored_as.is_read_whole(name)
            read = opened[stored].get(stored, None if whole else slices.get(name))
            for target, tensor in stored_as.convert(name, read).items():
                if target not in weight_views:
                    continue  # `unused` has said so
                part = slices.get(target) if whole else None
                fill(str(path), target, weight_views[target], cut(tensor, part))
            meter.add(checkpoint.tensors[stored].size, stored)

        for_each(paths, load, reading.threads)
