"""The plan of one step and its result: the interface between scheduler and executor.

Plain values that know no torch and no device. Types that are created once per row are named tuples, which are the
cheapest to construct.
A plan is a delta: the runner keeps, for each slot, its Start, its page tables and, on the device, its last sampled
token.

    scheduler.schedule() -> Plan -> executor.submit(plan) -> Future[Result] -> scheduler.apply(plan, result)

There is no prefill phase and no decode phase: a row computes positions [computed, computed + scheduled) of its slot.
A plan never contains tokens that are still to be sampled, or drafts: the input token at position p comes from
`Start.tokens` if p is within them; otherwise it is the slot's last sampled token, which the runner keeps on the
device, or one of the drafts that follow it, which the runner's drafter proposes. The exception are tokens that a
grammar forces (`Row.forced`): they are known before any step samples them.

    a row with 3 drafts, of which 2 are accepted       position    p    p+1   p+2   p+3
                                                       input     last    d1    d2    d3
                                                       sampled     d1    d2    t3     -      result: (d1, d2, t3)

While that row is in flight, the host knows only that the next one begins between p + 1 and p + 4. It plans for the
upper bound (`computed` = p + 4, `drafts_in_flight` = 3); the runner, whose device knows the length, begins at p + 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from srv.dist.agreement import IDLE, StepShape
from srv.types import RequestSpec, TokenLogprob

# How a step ran: each kernel was launched, a captured graph was replayed, or pieces of one, or it was compiled.
Way: TypeAlias = Literal["eager", "graph", "pieces", "compiled"]
SlowReason: TypeAlias = Literal[
    "",
    "more_rows_than_captured",  # a decode step has more rows than the largest graph
    "row_count_not_captured",  # no graph has this number of rows, and steps are not padded
    "more_tokens_than_captured",  # a step has more tokens than the largest piecewise graph
    "token_count_not_captured",  # no piecewise graph has this number of tokens, and steps are not padded
    "more_rows_than_compiled",  # a decode step has more rows than the compiled ones
    "not_compiled_for",  # the compiled function does not fit the step
    "experts_recorded",  # the usage of experts is recorded, which only eager steps can
]

# The codes of `RowResult.error` that say that the model computed something that is not finite.
NON_FINITE_LOGITS, NON_FINITE_HIDDEN_STATES = "non_finite_logits", "non_finite_hidden_states"
NON_FINITE_CODES = frozenset({NON_FINITE_LOGITS, NON_FINITE_HIDDEN_STATES})


@dataclass(frozen=True, slots=True)
class Start:
    """Assigns a slot to a request, either for the first time or after a retraction.

    `output`: the tokens generated before a retraction. `restored`: the slot of the recurrent states from which the
    request goes on; 0: it begins with none. Only models with recurrent layers have such slots.
    """

    slot: int
    request: RequestSpec
    output: tuple[int, ...] = ()
    restored: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token known so far: the prompt, then the output."""
        return self.request.tokens + self.output


class Row(NamedTuple):
    """The work on one slot in this step.

    `new_pages[group]` are the page ids to append to the slot's page table of that cache group; they never include
    page 0. In the first row after a Start they begin with the pages of the cached prefix, which already hold
    positions [0, computed) and must not be written.
    `sample`: the number of the row's last positions at which a token is sampled: 1 + drafts if the row reaches the
    last known token, otherwise 0.
    `score`: number of the row's last prompt positions to score: for each position p in
    [computed + scheduled - score, computed + scheduled) whose successor p + 1 is within the prompt, the result
    contains the log-probability of prompt token p + 1. 0: none.
    `vectors`: number of the row's last positions whose hidden states are pooled or returned. 0: none.
    `drafts`: the last `drafts` of the `scheduled` positions are drafts. A row with drafts has no score or vectors, and
    one position before its drafts.
    `drafts_in_flight`: number of drafts in the slot's earlier rows that are in flight. If it is not 0, `computed` is
    an upper bound: the row begins where the accepted tokens end, at most `drafts_in_flight` positions earlier.
    `saved`: the slot to which the recurrent states are copied when the row is computed. 0: none.
    `forced`: the tokens at all of the row's positions, if it has some that were never sampled: the last known token,
    then those that a grammar forces after it, which become output before the token that the row samples. ():
    every input token was in the slot's Start, or was sampled, or is a draft.
    """

    slot: int
    computed: int
    scheduled: int
    sample: int
    new_pages: tuple[tuple[int, ...], ...]
    score: int = 0
    vectors: int = 0
    drafts: int = 0
    drafts_in_flight: int = 0
    saved: int = 0
    forced: tuple[int, ...] = ()

    @property
    def jumped(self) -> tuple[int, ...]:
        """The tokens that become output without being sampled."""
        return self.forced[1:]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `starts` apply before `rows`; `ends` are the slots released since the last plan.

    The runner clears the slots in `ends` before it reads `starts`, so a slot may end and start in one plan. After
    a step that failed as a whole, `ends` may name slots whose Start the runner never saw, and a Start replaces
    whatever its slot still held.
    `late`: the slots whose rows sample only after `Executor.sample` has brought their late inputs (`srv.sched.late`);
    if there are any, the whole step waits. `shape`: of a step that several replicas compute together; one without rows
    is for the others.
    """

    step: int
    starts: tuple[Start, ...]
    rows: tuple[Row, ...]
    ends: tuple[int, ...]
    late: tuple[int, ...] = ()
    shape: StepShape | None = None

    @property
    def own_shape(self) -> StepShape:
        """That of this replica alone."""
        if not self.rows:
            return IDLE
        tokens = sum([row.scheduled for row in self.rows])
        outputs = sum([row.sample + row.score for row in self.rows])
        decodes = all((row.scheduled, row.sample, row.score, row.vectors) == (1, 1, 0, 0) for row in self.rows)
        return StepShape(tokens, outputs, decodes)


class RowResult(NamedTuple):
    """The result of a row. `tokens`: none for a chunk in mid-prompt; otherwise the accepted drafts and one token more.

    `logprobs` has one entry per token in `tokens` if the request asked for log-probabilities. `scores` are the
    prompt log-probabilities in order of position. `vectors`: the hidden states of the row's last `Row.vectors`
    positions, or the embedding once the whole prompt has been pooled, as little-endian float32. `error`: (code,
    message) if this request failed (for example, because its logits are not finite); the other rows are not affected.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    scores: tuple[TokenLogprob, ...] | None = None
    vectors: bytes | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One RowResult per row, in the order of `Plan.rows`. `way`: how its forward pass ran.

    `slow`: why an eager step was neither captured nor compiled; "" if that is not configured for steps of its kind.
    """

    step: int
    rows: tuple[RowResult, ...]
    way: Way = "eager"
    slow: SlowReason = ""
