"""How many drafts a request gets: as many as are expected to pay.

Owns what a request's past drafts say about its next ones. Must not know rows, pages or drafters.

A step costs a fixed amount and an amount per token, so that with n rows a draft costs `share(n)` of what a row costs
without drafts. Draft number j is accepted if all before it are: with an acceptance rate of a, the chance is a ** j. A
request gets the drafts whose chance is above their share of the cost: many where steps are bound by memory, few or none
where they are bound by computing, or where the text does not repeat itself. A request without drafts tries one now and
then, more rarely each time that it is rejected, because texts change.
"""

from __future__ import annotations

_MEMORY = 0.8  # weight of the past acceptance rate, per row
_MAX_PAUSE = 64  # rows between two trials at most


class DraftCost:
    """What a draft costs. `relative`: a token's part of the cost of a step, as a fraction of the fixed part."""

    def __init__(self, relative: float) -> None:
        self._relative = relative

    def share(self, rows: int) -> float:
        """The cost of a draft in a step of so many rows, as a fraction of the cost of one of these rows without it."""
        return rows * self._relative / (1 + rows * self._relative)


class DraftHistory:
    """The acceptance rate of one request. It starts at one in two."""

    __slots__ = ("_accepted", "_most", "_pause", "_rejected", "_wait")

    def __init__(self, most: int) -> None:
        self._most = most
        self._accepted = self._rejected = 1.0
        self._wait = 0  # rows until the next trial
        self._pause = 2  # rows to wait after a trial that is rejected

    @property
    def rate(self) -> float:
        """The fraction of drafts that are accepted among those that were verified."""
        return self._accepted / (self._accepted + self._rejected)

    def next_count(self, share: float) -> int:
        """How many drafts the next row has. Asked once per row."""
        count, chance = 0, self.rate
        while count < self._most and chance > share:
            count += 1
            chance *= self.rate
        if count or not self._most:
            return count
        if self._wait:
            self._wait -= 1
            return 0
        self._wait = self._pause
        return 1

    def record(self, drafts: int, accepted: int) -> None:
        """Of a row's drafts, the first `accepted` were right."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._rejected = _MEMORY * self._rejected + (accepted < drafts)
        if accepted < drafts:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        else:
            self._pause, self._wait = 2, 0
