"""Progress of weight loading: a log line every ten seconds and at the end; on a terminal, a bar of one rank instead."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)
_EVERY_S = 10.0
_MIB = 2**20


class LoadProgress:
    """A context manager; calling it with (total bytes, loaded bytes, name of the tensor or file) updates the bar.

    `bar`: whether there is one if standard error is a terminal, which ranks share. `clock`: seconds.
    """

    def __init__(self, model: str, *, bar: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._clock = model, clock
        self._begin = self._logged = clock()
        self._total = 0
        self._bar = _bar() if bar and sys.stderr.isatty() else None
        self._task: TaskID | None = None

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __call__(self, total_bytes: int, done_bytes: int, name: str) -> None:
        self._total = total_bytes
        if self._bar is None:
            self._log(done_bytes)
            return
        if self._task is None:
            self._task = self._bar.add_task(self._model, total=total_bytes)
        self._bar.update(self._task, total=total_bytes, completed=done_bytes)

    def _log(self, done_bytes: int) -> None:
        now = self._clock()
        if now - self._logged < _EVERY_S or done_bytes >= self._total:
            return
        self._logged = now
        done, total, rate = done_bytes / _MIB, self._total / _MIB, done_bytes / _MIB / (now - self._begin)
        logger.info("loading %s: %.0f of %.0f MiB (%.0f MiB/s)", self._model, done, total, rate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            seconds = self._clock() - self._begin
            logger.info("loaded %s, %.1f MiB of weights in %.1f s", self._model, self._total / _MIB, seconds)


def _bar() -> Progress:
    from rich.console import Console  # imported here, so that a server without a terminal starts faster
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=False)
