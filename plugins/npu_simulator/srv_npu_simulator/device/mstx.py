"""`torch_npu.npu.mstx`: ranges that a program marks for msprof."""

from __future__ import annotations

from collections import Counter


class Mstx:
    """finished: how often each range has ended, by the names of the ranges that were open when it began and its own."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._paths: dict[int, tuple[str, ...]] = {}
        self.finished: Counter[tuple[str, ...]] = Counter()

    def range_start(self, message: str, stream: object = None, domain: str = "default") -> int:
        """Begin a range; its id, above 0."""
        number = max(self._open, default=0) + 1
        self._open[number] = message
        self._paths[number] = tuple(self._open.values())
        return number

    def range_end(self, range_id: int, domain: str = "default") -> None:
        """End the range. RuntimeError for an id that is not open."""
        if range_id not in self._open:
            raise RuntimeError(f"mstx.range_end: no range {range_id} is open")
        self.finished[self._paths.pop(range_id)] += 1
        del self._open[range_id]
