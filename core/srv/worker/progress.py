"""Progress of weight loading: a log line at the end and, on a terminal, a progress bar, of one rank only."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)


class LoadProgress:
    """A context manager; calling it with (total bytes, loaded bytes, name of the tensor or file) updates the bar.

    `bar`: whether there is one if standard error is a terminal, which ranks share.
    """

    def __init__(self, model: str, *, bar: bool = True) -> None:
        self._model = model
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
            return
        if self._task is None:
            self._task = self._bar.add_task(self._model, total=total_bytes)
        self._bar.update(self._task, total=total_bytes, completed=done_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            logger.info("loaded %s, %.1f MiB of weights", self._model, self._total / 2**20)


def _bar() -> Progress:
    from rich.console import Console  # imported here, so that a server without a terminal starts faster
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=False)
