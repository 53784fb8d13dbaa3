"""Limits a rate: who comes too early waits, and if too many wait already, for MAX_WAIT_SECONDS.

This slows down clients that wait for a response before they send the next request. Must not know requests or responses.
The algorithm is GCRA, a leaky bucket (ITU-T I.371).
"""

from __future__ import annotations

import asyncio
import time

MAX_WAIT_SECONDS = 1.0  # nobody waits longer


class RateLimiter:
    """Grants `rate` permits per second, at most `burst` of them at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1 / rate
        self._slack = burst / rate
        self._due = 0.0  # when the next permit is due at an even rate

    def reserve(self, now: float) -> float:
        """Reserve the next permit and return the seconds from `now` until it is due."""
        due = max(self._due, now - self._slack) + self._interval
        if due - now > MAX_WAIT_SECONDS:
            return MAX_WAIT_SECONDS  # the queue is full and does not grow
        self._due = due
        return max(0.0, due - now)

    async def acquire(self) -> None:
        """Wait for the next permit."""
        seconds = self.reserve(time.monotonic())
        if seconds:
            await asyncio.sleep(seconds)
