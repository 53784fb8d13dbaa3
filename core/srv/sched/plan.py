"""The plan of one step and its result: the seam between scheduler and executor.

Plain values, free of torch and of any device; those that come once a row are named tuples, quickest to make.
A plan is a delta: the runner keeps, for each slot, the tokens it was started with, its page tables and, on the
device, its last sampled token.

    scheduler.schedule() -> Plan -> executor.submit(plan) -> Future[Result] -> scheduler.apply(plan, result)

There is no prefill and no decode: a row computes positions [computed, computed + scheduled) of its slot.
Tokens that are not yet sampled are never in a plan: position p is fed from `Start.tokens` if it lies
within them, else it is the slot's last sampled token, which the runner holds on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from srv.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Start:
    """A request takes a slot (for the first time, or again after it was retracted).

    `tokens`: every token known so far, prompt first, then what was generated before a retraction.
    `prompt_tokens`: how many of them are the prompt (penalties count the rest as output).
    """

    slot: int
    request: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    params: SamplingParams
    adapter: str | None = None
    grammar: str | None = None


class Row(NamedTuple):
    """The work on one slot in this step.

    `new_pages[group]` are page ids to append to the slot's page table of that cache group (page 0 is
    never among them); in the first row after a start they begin with the pages of the cached prefix, which
    hold positions [0, computed) already and must not be written.
    `lookahead`: positions beyond computed + scheduled that have pages, for speculation.
    `sample`: the row reaches the last known token, so a next token is sampled at its last position.
    `score`: number of this row's last-computed prompt positions to score: for each position p in
    [computed + scheduled - score, computed + scheduled) whose successor p + 1 lies within the prompt, the
    log-probability of prompt token p + 1 is returned. 0: none.
    """

    slot: int
    computed: int
    scheduled: int
    sample: bool
    new_pages: tuple[tuple[int, ...], ...]
    score: int = 0
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `starts` come before `rows`; `ends` are slots given back since the last plan.

    A slot in `ends` is forgotten before `starts` are read, so a slot may end and start in one plan. After
    a step that failed as a whole, the runner may be asked to end slots that it never saw start, and a start
    replaces whatever its slot still held.
    """

    step: int
    starts: tuple[Start, ...]
    rows: tuple[Row, ...]
    ends: tuple[int, ...]

    @property
    def scheduled_tokens(self) -> int:
        return sum(row.scheduled for row in self.rows)


class RowResult(NamedTuple):
    """What a row brought. `tokens`: none in mid-prompt, one after sampling, several with speculation.

    `logprobs` goes with `tokens` one to one if the request asked for them. `scores` are the prompt
    log-probabilities in order of position. `error`: (code, message); the request failed alone
    (for example, its logits are not finite), and the other rows are unharmed.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    scores: tuple[TokenLogprob, ...] | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Results row by row, in the order of `Plan.rows`. `replayed`: the step replayed a captured one."""

    step: int
    rows: tuple[RowResult, ...]
    replayed: bool = False
