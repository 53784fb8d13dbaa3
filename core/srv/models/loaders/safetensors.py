"""Weights from safetensors files, one or many, mapped into memory and copied tensor by tensor.

Owns the walk over a checkpoint's files. Must not know architectures, but for the two kinds of stored tensors
that no model reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from srv.errors import ModelError
from srv.models.base import Progress
from srv.models.loaders.filling import OTHER_CHECKPOINT, Meter, check_names
from srv.models.safetensors_header import FETCH_AGAIN, Checkpoint, read_checkpoint
from srv.models.storage import Storage


def load_safetensors(
    folder: Path,
    targets: Mapping[str, Tensor],
    progress: Progress | None = None,
    storage: Storage | None = None,
) -> None:
    """Fill every target from the folder's files, converting numbers to the target's dtype.

    `storage` says how stored tensors become those of a model in 8 bits. Raises ModelError: no_weights,
    missing_tensors, unexpected_tensors, shape_mismatch, dtype_mismatch, truncated, damaged.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint is None:
        remedy = "Fetch the weights, or give --load-format dummy for random ones"
        raise ModelError("no_weights", str(folder), "the folder has no safetensors file", remedy)
    storage = storage or Storage()
    made = storage.shapes({name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    unneeded = ignorable(checkpoint, targets) | storage.ignored(made.keys() - targets.keys())
    check_names(str(folder), targets, made, unneeded)
    meter = Meter(sum(tensor.size for name, tensor in checkpoint.tensors.items() if name in targets), progress)
    for path, names in checkpoint.files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in (name for name in names if name in targets):
                    for target, tensor in storage.tensors(name, file.get_tensor(name)).items():
                        _fill(path, target, targets[target], tensor)
                    meter.add(checkpoint.tensors[name].size, name)
        except SafetensorError as error:
            raise ModelError("damaged", str(path), f"its weights cannot be read ({error})", FETCH_AGAIN) from error


def _fill(path: Path, name: str, target: Tensor, stored: Tensor) -> None:
    if stored.dtype != target.dtype and not (stored.is_floating_point() and target.is_floating_point()):
        reason = f"tensor {name} is stored as {_name(stored)}, and its layer computes with {_name(target)}"
        raise ModelError("dtype_mismatch", str(path), reason, OTHER_CHECKPOINT)
    target.copy_(stored)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def ignorable(checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> set[str]:
    """Stored tensors to pass over: RoPE frequencies of old checkpoints, and a tied head stored beside its twin."""
    tied = {"lm_head.weight"} - targets.keys()
    return {name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")} | tied
