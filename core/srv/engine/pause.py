"""Whether the engine plans steps: an operator pauses it, and no request is lost (`/pause_generation`).

Paused, requests are accepted and wait, running ones keep their slots and pages unless they are retracted, and aborts
and a shutdown work. Must not know what a step is.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.io.messages import Pause, Paused


class PauseSwitch:
    """`retract`: takes slots and pages from running requests, which wait and resume where they stopped."""

    def __init__(self, retract: Callable[[], None], answer: Callable[[Paused], None]) -> None:
        self.paused = False
        self._retract, self._answer = retract, answer
        self._pending: list[Pause] = []

    def set(self, message: Pause) -> None:
        """Pause or go on. `settle` answers."""
        self.paused = message.paused
        self._pending.append(message)

    def release(self) -> None:
        """Go on without a message: a shutdown lets running requests finish."""
        self.paused = False

    def settle(self, in_flight: bool) -> None:
        """Answer what waits, once no step is in flight; going on is answered at once."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for each in pending:
            if each.paused and in_flight and self.paused:
                self._pending.append(each)
                continue
            if each.retract and self.paused:
                self._retract()
            self._answer(Paused(each.call, self.paused))
