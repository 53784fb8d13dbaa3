"""Lines of the engine's log about its steps: throughput, queue and pool every so many steps, and, if asked for,
how long the parts of a step took.

    steps: 12 running, 3 queued, pool 41.5 % used, cache hits 30.1 %, 812.4 tokens/s
    time of 40 steps: schedule 0.12 ms, submit 0.30 ms, apply 0.25 ms (mean)

Per step it costs the increment of a counter; the clock is only read for the parts if that is asked for. Must not know
the scheduler or the executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from srv.args.groups.observe import ObserveArgs
from srv.sched.limits import SchedulerStats

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class StepLog:
    """interval: steps between two lines. parts: whether parts of a step are timed."""

    def __init__(self, observe: ObserveArgs, stats: Callable[[], SchedulerStats]) -> None:
        self._interval, self._parts, self._stats = observe.decode_log_interval, observe.show_time_cost, stats
        self._left = self._interval
        self._since, self._generated = time.perf_counter(), 0
        self._seconds: dict[str, float] = {}

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """The function, whose calls are timed as this part of a step; the function itself if nothing is timed."""
        if not self._parts:
            return function
        seconds = self._seconds
        seconds[part] = 0.0

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - began

        return call

    def applied(self) -> None:
        """A step has been applied."""
        self._left -= 1
        if not self._left:
            self._left = self._interval
            self._write()

    def _write(self) -> None:
        stats, now = self._stats(), time.perf_counter()
        used = stats.pages_held / stats.pages_total if stats.pages_total else 0.0
        hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        rate = (stats.generated_tokens - self._generated) / max(now - self._since, 1e-9)
        self._since, self._generated = now, stats.generated_tokens
        logger.info(
            "steps: %d running, %d queued, pool %.1f %% used, cache hits %.1f %%, %.1f tokens/s",
            stats.running,
            stats.waiting,
            100 * used,
            100 * hits,
            rate,
        )
        if self._seconds:
            means = ", ".join(f"{part} {1e3 * spent / self._interval:.2f} ms" for part, spent in self._seconds.items())
            logger.info("time of %d steps: %s (mean)", self._interval, means)
            self._seconds.update(dict.fromkeys(self._seconds, 0.0))
