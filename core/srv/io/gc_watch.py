"""Logs garbage collections of this process that take long (`--gc-warning-threshold-secs`).

A collection may begin anywhere, also while a log line is written. So its callback only notes how long it took, and a
thread of its own logs.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from queue import SimpleQueue

logger = logging.getLogger(__name__)


def watch_collections(seconds: float) -> None:
    """From now on, log each collection that takes longer than this; 0: log none, which costs nothing."""
    if seconds <= 0:
        return
    slow: SimpleQueue[tuple[float, int, int]] = SimpleQueue()
    began = 0.0

    def observe(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif (took := time.perf_counter() - began) > seconds:
            slow.put((took, info["generation"], info["collected"]))

    def write() -> None:
        while True:
            took, generation, collected = slow.get()
            logger.warning(
                "a garbage collection of generation %d took %.6f s and freed %d objects; this process did nothing else",
                generation,
                took,
                collected,
            )

    gc.callbacks.append(observe)
    threading.Thread(target=write, name="gc-watch", daemon=True).start()
