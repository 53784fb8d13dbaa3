"""How much work grammars may take in the engine's loop, where all streams wait for them, whatever the backend.

Owns the limits on one step, over all its outputs, and on one request. What a step makes ahead of the outputs is only
saved time, so that it ends with the step's budget. A mask that an output needs is made while the step has time for it,
or if it is within the output's share of that time; an output that gets none, or whose masks take too much time, ends
with an error. That time is of the processor, so that a busy machine ends nothing (docs/adr/0106-masks-of-a-step.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from srv.grammar.backend import GrammarBackend, Masks, Matcher

AHEAD_MASKS = 512  # that a step makes ahead of its outputs
AHEAD_SECONDS = 0.005  # of this thread, for them
TOGETHER = 4  # outputs whose masks are made at a time, whatever they cost; the library may use as many processors
SLOW_FILL_SECONDS = 0.02  # of a step's masks that are made together; after it, each is timed on its own
STEP_SECONDS = 0.15  # for all masks that a step needs
LEAST_SHARE = 0.001  # of them, for each output of a step that has very many
FAIR_SECONDS = 0.01  # per mask
SUSPECT_SECONDS = 0.003  # of a mask, after which the next one may be slow: an ambiguous grammar grows by the token
MASK_SECONDS = 0.1  # that no mask may exceed
QUICK_MASKS = 8  # in a row, after which the masks of an output are made in the loop again
EXTRA_SECONDS = 1.0  # beyond the fair time, of all masks of a request


class MaskTime:
    """The time that the masks of one output take. `timed`: each is made alone; `last`: seconds of the last one of them;
    `excess`: why it is too much, or ""."""

    __slots__ = ("_extra", "_quick", "excess", "last", "timed")

    def __init__(self, slow: bool = False) -> None:
        self._extra, self.last, self.excess, self.timed = 0.0, 0.0, "", False
        self._quick = 0 if slow else QUICK_MASKS  # masks since the last slow one

    @property
    def slow(self) -> bool:
        """Whether the next mask may keep the engine's loop waiting."""
        return self._quick < QUICK_MASKS

    def suspect(self) -> None:
        """The mask was one of several that took long together."""
        self._quick = 0

    def add(self, seconds: float, waited: float) -> None:
        """One mask has taken this time of the processor, and the caller has waited so long for it."""
        self.last = seconds
        self._quick = 0 if seconds > SUSPECT_SECONDS or waited > SLOW_FILL_SECONDS else self._quick + 1
        self._extra += max(0.0, seconds - FAIR_SECONDS)
        self.timed = seconds > FAIR_SECONDS
        if seconds > MASK_SECONDS:
            self.excess = f"the tokens that may follow took {seconds:.2g} seconds to find, more than {MASK_SECONDS:g}"
        elif self._extra > EXTRA_SECONDS:
            extra = f"{EXTRA_SECONDS:g} seconds more than {FAIR_SECONDS:g} per token"
            self.excess = f"the tokens that may follow took {extra} to find"


class Timed(Protocol):
    """An output whose masks are timed. `grammar`: the same object for outputs of one grammar."""

    matcher: Matcher
    time: MaskTime
    grammar: object


class AheadBudget:
    """What is left of a step's masks that are made ahead."""

    def __init__(self) -> None:
        self._masks, self._until = AHEAD_MASKS, time.thread_time() + AHEAD_SECONDS

    def fill(self, backend: GrammarBackend, outputs: Sequence[Timed], masks: Masks) -> int:
        """Write the masks of the first outputs into their rows. Returns of how many."""
        for begin in range(0, len(outputs), TOGETHER):
            end = min(begin + TOGETHER, len(outputs), begin + self._masks)
            if end == begin or time.thread_time() > self._until:
                return begin
            self._masks -= end - begin
            if _fill_together(backend, outputs[begin:end], masks[begin:end]) > SLOW_FILL_SECONDS:
                _time_each(outputs[begin:end])
        return len(outputs)


def fill_needed(backend: GrammarBackend, outputs: Sequence[Timed], masks: Masks) -> None:
    """Write the mask of each output into its row, and none for an output that the step has no time for."""
    began, rows, wall = time.thread_time(), 0, 0.0
    if len(outputs) > 1 and not any(output.time.timed for output in outputs):
        while rows < len(outputs) and wall <= SLOW_FILL_SECONDS:
            end = rows + (TOGETHER if rows else 1)  # the outputs of one request cost the same: one shows it
            took = _fill_together(backend, outputs[rows:end], masks[rows:end])
            if took > FAIR_SECONDS:
                for output in outputs[rows:end]:
                    output.time.suspect()
            wall += took
            rows = end
        if wall > SLOW_FILL_SECONDS:
            _time_each(outputs)
    _fill_apart(backend, outputs, range(rows, len(outputs)), masks, time.thread_time() - began)


def _fill_together(backend: GrammarBackend, outputs: Sequence[Timed], masks: Masks) -> float:
    """Returns the seconds that it took, whichever threads made the masks."""
    began = time.perf_counter()
    backend.fill([output.matcher for output in outputs], masks)
    return time.perf_counter() - began


def _time_each(outputs: Sequence[Timed]) -> None:
    for output in outputs:
        output.time.timed = True


def _fill_apart(
    backend: GrammarBackend, outputs: Sequence[Timed], rows: Sequence[int], masks: Masks, spent: float
) -> None:
    """Make these masks one by one, the cheapest first. A mask is expected to cost what the last one of its output did,
    or what those of its grammar do in this step. `spent`: seconds of the step before."""
    share = max(STEP_SECONDS / len(outputs), LEAST_SHARE)
    seen: dict[int, list[float]] = {}  # seconds of masks in this step, by the identity of their grammar
    for row in sorted(rows, key=lambda row: outputs[row].time.last):
        output = outputs[row]
        alike = seen.setdefault(id(output.grammar), [])
        expected = max(output.time.last, sum(alike) / max(len(alike), 1))
        if expected > share and spent + expected > STEP_SECONDS:
            masks[row] = 0
            output.time.excess = (
                f"the tokens that may follow take {expected:.2g} seconds to find, and a step has {STEP_SECONDS:g} for"
                f" its {len(outputs)} outputs with grammars"
            )
            continue
        began, called = time.thread_time(), time.perf_counter()
        backend.fill([output.matcher], masks[row : row + 1])
        alike.append(time.thread_time() - began)
        output.time.add(alike[-1], time.perf_counter() - called)
        spent += alike[-1]
