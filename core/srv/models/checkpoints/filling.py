"""What all loaders share: the check of names and shapes, and the byte count of the progress bar.

Owns the errors about missing and unexpected tensors and wrong shapes. Must not know any file format.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from srv.errors import ModelError, listed
from srv.models.checkpoints.slices import Slices, stored_shape

# progress(total bytes, bytes done, name of the tensor or file just done)
Progress: TypeAlias = Callable[[int, int, str], None]

NO_SLICES: Slices = MappingProxyType({})
OTHER_CHECKPOINT = "The weights and config.json belong to different models: download both again from one place"


def check_names(
    path: str,
    weight_views: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Collection[str] = (),
    slices: Slices = NO_SLICES,
    remedy: str = OTHER_CHECKPOINT,
) -> None:
    """Raise ModelError unless `shapes` (of the stored tensors) has exactly the model's names and shapes.

    `slices`: the parts of stored tensors that `weight_views` hold; of those on other ranks, it is empty. `ignored`:
    stored names that the model may have no tensor for. Error codes: missing_tensors, unexpected_tensors,
    shape_mismatch.
    """
    missing = sorted(weight_views.keys() - shapes.keys())
    if missing:
        raise ModelError("missing_tensors", path, f"it lacks {listed(missing)}", remedy)
    elsewhere = {name for name, part in slices.items() if part.is_empty}
    unexpected = sorted(shapes.keys() - weight_views.keys() - set(ignored) - elsewhere)
    if unexpected:
        reason = f"it contains tensors that the model does not have: {listed(unexpected)}"
        raise ModelError("unexpected_tensors", path, reason, remedy)
    mismatched = [
        f"{name} (stored {list(shapes[name])}, expected {list(expected)})"
        for name, view in weight_views.items()
        if (expected := stored_shape(view.shape, slices.get(name))) != shapes[name]
    ]
    if mismatched:
        raise ModelError("shape_mismatch", path, f"shapes differ: {listed(mismatched)}", remedy)


class Meter:
    """Counts loaded bytes and reports them to `progress`, if there is one, from one thread at a time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()
        self.add(0, "")

    def add(self, count: int, name: str) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._total, self._done, name)


@contextmanager
def own_threads(threads: int, *, one: bool = False) -> Iterator[None]:
    """Run torch on one thread within the context if there are several callers, or if `one` says so."""
    before = torch.get_num_threads()
    if threads > 1 or one:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
