"""What all loaders share: checking names and shapes against the model, and counting bytes for the progress bar.

Owns the errors about missing, unexpected and misshapen tensors. Must not know any file format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from srv.errors import ModelError
from srv.models.base import Progress

SHOWN = 5
OTHER_CHECKPOINT = "The checkpoint does not belong to its configuration: fetch both again from one place"


def check_names(
    path: str,
    targets: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Collection[str] = (),
) -> None:
    """Raise ModelError unless `shapes` (of the stored tensors) has exactly the model's names and shapes.

    `ignored` are stored names that the model rightly has no place for. Codes: missing_tensors,
    unexpected_tensors, shape_mismatch.
    """
    missing = sorted(targets.keys() - shapes.keys())
    if missing:
        raise ModelError("missing_tensors", path, f"it lacks {listed(missing)}", OTHER_CHECKPOINT)
    unexpected = sorted(shapes.keys() - targets.keys() - set(ignored))
    if unexpected:
        reason = f"the model has no place for {listed(unexpected)}"
        raise ModelError("unexpected_tensors", path, reason, OTHER_CHECKPOINT)
    wrong = [
        f"{name} (stored {list(shapes[name])}, expected {list(target.shape)})"
        for name, target in targets.items()
        if tuple(target.shape) != shapes[name]
    ]
    if wrong:
        raise ModelError("shape_mismatch", path, f"shapes differ: {listed(wrong)}", OTHER_CHECKPOINT)


def listed(names: Collection[str]) -> str:
    """The first few names, and how many there are."""
    shown = ", ".join(list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more ({len(names)} in all)"


class Meter:
    """Adds up bytes and tells `progress`, if there is one."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self.add(0, "")

    def add(self, count: int, name: str) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._total, self._done, name)
