"""How fast refusals go out while others are being served.

Owns one clock. Must not know requests or responses.

A refusal costs the server little, but one client in a loop asks for the next as soon as it has the last, and on a
machine whose cores compute tokens that is paid by every running stream. So refusals beyond `rate` a second wait: who
is refused is slowed down, whoever it is, and who is served is not. It holds back clients that wait for an answer
before they ask again; those that do not (more of them than `rate` allows in a second) each wait the longest time. The
schedule is that of a leaky bucket (GCRA, ITU-T I.371).
"""

from __future__ import annotations

import asyncio
import time

LONGEST_SECONDS = 1.0  # no refusal waits longer, however many there are


class Pace:
    """`rate` turns a second, `burst` of them at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1 / rate
        self._slack = burst / rate
        self._due = 0.0  # when the next turn would be, had all come evenly

    def reserve(self, now: float) -> float:
        """Take the next turn; seconds from `now` until it comes."""
        due = max(self._due, now - self._slack) + self._interval
        if due - now > LONGEST_SECONDS:
            return LONGEST_SECONDS  # the line is full: it does not grow
        self._due = due
        return max(0.0, due - now)

    async def turn(self) -> None:
        """Wait for the next turn."""
        seconds = self.reserve(time.monotonic())
        if seconds:
            await asyncio.sleep(seconds)
