"""Limits the rate of refusals while other requests are being served.

Must not know requests or responses.

One refusal is cheap, but a client that retries in a loop takes CPU time from every running stream if the model runs on
the same cores. Refusals beyond `rate` per second therefore wait, for all clients together; responses to accepted
requests do not. This slows down clients that wait for a response before they retry; if too many refusals are due, each
waits MAX_WAIT_SECONDS. The algorithm is GCRA, a leaky bucket (ITU-T I.371).
"""

from __future__ import annotations

import asyncio
import time

MAX_WAIT_SECONDS = 1.0  # no refusal waits longer


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
