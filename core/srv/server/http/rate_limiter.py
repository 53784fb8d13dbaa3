"""Limits the rate of refusals while other requests are being served.

Must not know requests or responses.

One refusal is cheap, but a client that retries in a loop takes CPU time from every running stream on a machine whose
cores also compute tokens. Refusals beyond `rate` per second therefore wait, whichever client they are for; responses
to accepted requests do not. Clients that wait for an answer before they retry are slowed down; if more refusals are due
than `rate` allows, each waits MAX_WAIT_SECONDS. The algorithm is GCRA, a leaky bucket (ITU-T I.371).
"""

from __future__ import annotations

import asyncio
import time

MAX_WAIT_SECONDS = 1.0  # no refusal waits longer, however many there are


class RateLimiter:
    """`rate` permits per second, at most `burst` of them at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1 / rate
        self._slack = burst / rate
        self._due = 0.0  # the time of the next permit, had all been taken evenly

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
