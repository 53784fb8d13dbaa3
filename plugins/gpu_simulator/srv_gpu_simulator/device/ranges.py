"""The ranges that a program marks for the vendor's profiler: `torch.cuda.nvtx`, and `torch.profiler.itt` for Intel."""

from __future__ import annotations

from collections import Counter


class Ranges:
    """finished: how often each range has ended, by the names of the ranges around it and its own."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self.finished: Counter[tuple[str, ...]] = Counter()

    def range_push(self, msg: str) -> int:
        """Begin a range within those that are open; their number."""
        self._open.append(msg)
        return len(self._open) - 1

    def range_pop(self) -> int:
        """End the innermost range. RuntimeError if none is open."""
        if not self._open:
            raise RuntimeError("range_pop: no range is open")
        self.finished[tuple(self._open)] += 1
        self._open.pop()
        return len(self._open)
