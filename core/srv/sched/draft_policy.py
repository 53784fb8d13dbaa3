"""How many drafts a request gets: as many as are expected to pay.

Owns what a request's past drafts say about its next ones. Must not know rows, pages or drafters.

A draft costs what the step takes longer, and pays if its chance to be accepted is above its share of what a row costs
without drafts. Draft number j is accepted if all before it are: with an acceptance rate of a, the chance is a ** j. So
there are many drafts where steps are bound by memory, and few or none where they are bound by computing, or where the
text does not repeat itself. A new request is expected to be like those before it. A request without drafts tries one
now and then, more rarely each time that it is rejected, because texts change; and rarely from the beginning, if those
of earlier requests were rejected. Where drafts are dear, requests try theirs in the same steps: the first draft of a
step costs the most.
"""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 0.8  # weight of a request's past acceptance rate, per row
_ENGINE_MEMORY = 0.99  # of that of all requests
_MIN_PAUSE, _MAX_PAUSE = 2, 64  # rows between two trials
_DEAR = 0.3  # a share of the cost from which on only one step in `_TRIAL_STEPS` has trials
_TRIAL_STEPS = 16
_WORTH = 0.8  # the most that a forced token may cost, as a share of what a row costs


def allows_trial(step: int, share: float) -> bool:
    """Whether requests may try a draft in this step, by its number."""
    return share < _DEAR or step % _TRIAL_STEPS == 0


class DraftCost:
    """What drafts cost. `step_seconds`: (tokens, seconds) of steps, ascending in tokens; (): drafts are free.

    most: drafts per row.
    """

    def __init__(self, step_seconds: Sequence[tuple[int, float]], most: int) -> None:
        self._points = tuple(step_seconds)
        self._most = most
        self._shares: dict[int, float] = {}

    def share(self, rows: int) -> float:
        """The cost of a draft in a step of so many rows, as a fraction of the cost of one of these rows without it."""
        if not self._points or not self._most:
            return 0.0
        if rows not in self._shares:
            without, drafted = self._seconds(rows), self._seconds(rows * (1 + self._most))
            self._shares[rows] = max(drafted - without, 0.0) / (self._most * without)
        return self._shares[rows]

    def jump_pays(self, rows: int, jumped: int) -> bool:
        """Whether so many forced tokens in a step of so many rows cost less than as rows of later steps."""
        if len(self._points) < 2:
            return True
        without = self._on_line(rows)
        return self._on_line(rows + jumped) - without < _WORTH * jumped * without / rows

    def _on_line(self, tokens: int) -> float:
        """Interpolated between the measured points; beyond the last one, on the line through the last two."""
        pairs = list(zip(self._points, self._points[1:], strict=False))
        (low, fast), (high, slow) = next((pair for pair in pairs if pair[1][0] >= tokens), pairs[-1])
        return fast + (slow - fast) * (tokens - low) / (high - low)

    def _seconds(self, tokens: int) -> float:
        """Interpolated between the measured points; beyond the last one, in proportion to the tokens."""
        (first, least), *_, (last, most) = self._points
        if tokens >= last or first == last:
            return most * tokens / last
        return least if tokens <= first else self._on_line(tokens)


class AcceptanceRate:
    """The fraction of drafts that are accepted among those that were verified; the latest rows count most.

    initial: the rate before the first row, which weighs as much as two drafts.
    """

    __slots__ = ("_accepted", "_memory", "_rejected")

    def __init__(self, memory: float = _ENGINE_MEMORY, initial: float = 0.5) -> None:
        self._memory = memory
        self._accepted, self._rejected = 2 * initial, 2 * (1 - initial)

    @property
    def value(self) -> float:
        return self._accepted / (self._accepted + self._rejected)

    def record(self, drafts: int, accepted: int) -> None:
        """Of a row's drafts, the first `accepted` were right; those after the first wrong one were not verified."""
        self._accepted = self._memory * self._accepted + accepted
        self._rejected = self._memory * self._rejected + (accepted < drafts)


class DraftHistory:
    """What the past drafts of one request say about its next ones. `initial`: the acceptance rate to expect."""

    __slots__ = ("_pause", "_rate", "_wait")

    def __init__(self, initial: float = 0.5) -> None:
        self._rate = AcceptanceRate(_MEMORY, initial)
        # Rows to wait after a trial that is rejected: at first, those in which one draft is expected to be accepted.
        self._pause = min(max(_MIN_PAUSE, round(1 / max(initial, 1 / _MAX_PAUSE))), _MAX_PAUSE)
        self._wait = self._pause - _MIN_PAUSE  # rows until the next trial

    def pauses(self, share: float, trial: bool) -> bool:
        """Whether the next row has no drafts, whatever its limit. If not, `next_count` says how many it has.

        Asked once per row. `trial`: whether this step may try a draft.
        """
        if share >= 1:  # a draft that costs as much as a row never pays
            return True
        if self._rate.value > share:
            return False
        if self._wait:
            self._wait -= 1
            return True
        return not trial

    def next_count(self, share: float, limit: int) -> int:
        """How many drafts the next row has, at most `limit`: as many as pay, or one as a trial."""
        if limit <= 0:
            return 0
        rate = chance = self._rate.value
        count = 0
        while count < limit and chance > share:
            count += 1
            chance *= rate
        if not count:
            self._wait = self._pause
        return max(count, 1)

    def record(self, drafts: int, accepted: int) -> None:
        """Of a row's drafts, the first `accepted` were right."""
        self._rate.record(drafts, accepted)
        if accepted < drafts:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        else:
            self._pause, self._wait = _MIN_PAUSE, 0
