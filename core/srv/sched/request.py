"""One request as the scheduler sees it: its tokens and its counters.

Owns a request's tokens and counters. Must not know the queue, pages (a lease is opaque) or other requests.

    tokens    [ prompt ............ | output ..... ] ? ? ......
              0        confirmed    bound          total        max_total_tokens
                       in results   in plans       known + being sampled

`confirmed <= bound <= total <= max_total_tokens`: a request can be scheduled while bound < total, and nothing is
left to sample when total == max_total_tokens. Drafts in flight count in `bound` and `total` as if all were accepted;
the result of their row takes the rejected ones back. So there are pages up to `bound` before a step is submitted, but
only what is `confirmed` is published, returned or kept.
"""

from __future__ import annotations

import enum
import sys
from typing import NamedTuple

from srv.memory.cache import Lease
from srv.memory.radix import Match
from srv.sched.draft_policy import DraftHistory
from srv.sched.plan import Row
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec

NEVER = sys.maxsize  # a position that no request reaches


class Claimant(NamedTuple):
    """Whose share of the slots a request uses: that of a client request, and of its owner."""

    owner: str
    group: str


class State(enum.Enum):
    """WAITING -> RUNNING -> ENDING -> RELEASED. A retraction leads from RUNNING back to WAITING.

    A request without rows in flight goes from RUNNING to RELEASED directly.
    """

    WAITING = "waiting"  # in the queue; holds no slot and no lease
    RUNNING = "running"  # holds a slot and a lease
    ENDING = "ending"  # is not scheduled any more; keeps slot and lease until its rows in flight have finished
    RELEASED = "released"


class Request:
    """`arrival` is the order of requests; `max_total_tokens` limits prompt and output tokens together."""

    __slots__ = (
        "abort_pending",
        "arrival",
        "bound",
        "cached_tokens",
        "capacity",
        "claimant",
        "confirmed",
        "decodes_only",
        "draft_history",
        "drafts_in_flight",
        "forced",
        "id",
        "in_flight",
        "kv_invalid",
        "lease",
        "match",
        "match_version",
        "max_total_tokens",
        "next_saved_position",
        "next_scored_position",
        "next_vector_position",
        "output",
        "pages_sent",
        "prefix_producer",
        "prompt",
        "published",
        "retractions",
        "saved_positions",
        "scheduled_at",
        "slot",
        "spec",
        "start_tokens",
        "state",
        "stop_tokens",
        "suspended",
        "times_bypassed",
        "total",
        "waits_for_late_inputs",
    )

    def __init__(self, spec: RequestSpec, arrival: int, context_length: int, end_tokens: frozenset[int]) -> None:
        self.id = spec.id
        self.spec = spec
        self.claimant = Claimant(spec.owner, spec.group or spec.id)
        self.prompt = spec.tokens
        self.arrival = arrival
        self.stop_tokens: frozenset[int] = frozenset()
        self.next_scored_position = len(self.prompt)
        # The first position whose hidden state is still needed, to be pooled or returned; None: none ever.
        self.next_vector_position: int | None = None
        params = spec.params
        if isinstance(params, PoolingParams):
            self.max_total_tokens = len(self.prompt)
            self.next_vector_position = len(self.prompt) - 1 if params.pooling is Pooling.LAST else 0
        else:
            self.max_total_tokens = min(len(self.prompt) + params.max_tokens, context_length)
            stop_tokens = frozenset() if params.ignore_eos else end_tokens
            self.stop_tokens = stop_tokens.union(params.stop_token_ids) if params.stop_token_ids else stop_tokens
            if params.prompt_logprobs is not None:  # scoring begins one position before the first scored token
                self.next_scored_position = max(params.prompt_logprobs_start, 1) - 1
            if params.hidden_states:
                self.next_vector_position = 0

        self.state = State.WAITING
        self.output: list[int] = []
        self.start_tokens = self.prompt  # all tokens known when it last entered the queue; `Start.tokens`
        self.cached_tokens = 0
        self.retractions = 0
        self.times_bypassed = 0
        self.scheduled_at: float | None = None  # `Output.scheduled_at`
        self.match: Match | None = None
        self.match_version = -1
        self.prefix_producer: Request | None = None  # the running request whose prompt this one waits for

        # Where rows end so that recurrent states can be saved: within the tokens of its start, and the next one of all.
        self.saved_positions: tuple[int, ...] = ()
        self.next_saved_position = NEVER

        self.slot = -1
        self.lease: Lease | None = None
        self.capacity = 0  # positions whose pages a plan has already carried to the runner
        self.pages_sent: tuple[int, ...] = ()  # the number of these pages in each cache group
        self.confirmed = 0
        self.bound = 0
        self.total = len(self.prompt)
        self.draft_history: DraftHistory | None = None  # None: it gets no drafts
        self.waits_for_late_inputs = False
        self.suspended = False  # it gets no row: its next late input is being made
        self.drafts_in_flight = 0  # drafts of the rows in flight
        self.forced: tuple[int, ...] = ()  # what its next row may compute: the token being sampled, and those after it
        self.in_flight = 0  # rows in flight
        self.decodes_only = False  # all that its next rows do is decode: the prompt is published, no vectors are needed
        self.published = False  # the full pages of the start tokens were offered to the prefix tree
        self.kv_invalid = False  # a row failed, so its KV must not be shared
        self.abort_pending = False  # aborted and ENDING; its last Output is sent when its rows have finished

    @property
    def max_kv_tokens(self) -> int:
        """Upper bound of the positions that need KV: the last sampled token is never fed back."""
        return max(len(self.prompt), self.max_total_tokens - 1)

    @property
    def prefix_limit(self) -> int:
        """Maximum tokens of a prefix hit. At least one token must be computed, and so must every position to score and
        every one whose hidden state is needed.
        """
        limit = len(self.start_tokens) - 1
        if self.next_scored_position < len(self.prompt) - 1:
            limit = min(limit, self.next_scored_position)
        return limit if self.next_vector_position is None else min(limit, self.next_vector_position)

    def score_count(self, end: int) -> int:
        """`Row.score` of a row that computes [bound, end)."""
        begin = max(self.bound, self.next_scored_position)
        return end - begin if begin < min(end, len(self.prompt) - 1) else 0

    def vector_count(self, end: int) -> int:
        """`Row.vectors` of a row that computes [bound, end); 0 unless hidden states are still needed."""
        return 0 if self.next_vector_position is None else max(0, end - max(self.bound, self.next_vector_position))

    def computed_tokens(self) -> tuple[int, ...]:
        """Tokens whose KV is computed and valid."""
        return () if self.kv_invalid else (self.prompt + tuple(self.output))[: self.confirmed]

    def schedule(self, row: Row) -> None:
        """The row is in a plan: count it as in flight, as if all its drafts were accepted."""
        self.bound = row.computed + row.scheduled
        self.total += row.sample + (row.scheduled - 1 if row.forced else 0)
        self.forced = ()
        self.drafts_in_flight += row.drafts
        self.in_flight += 1

    def confirm(self, row: Row, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append the tokens of the oldest row in flight, those that it jumped first, and take back its drafts that were
        not accepted.

        Returns what `append_output` does. Of a row that samples, the KV of all tokens but the last is confirmed.
        """
        rejected = row.sample + (row.scheduled - 1 if row.forced else 0) - len(tokens)
        self.bound -= rejected
        self.total -= rejected
        appended, reason = self.append_output(tokens)
        length = len(self.prompt) + len(self.output)
        self.confirmed = length - 1 if row.sample else row.computed + row.scheduled
        return appended, reason

    def drop(self, row: Row) -> None:
        """The result of the oldest row in flight is not needed: the request has ended. All known tokens have KV now,
        unless the row is one of its prompt.
        """
        self.confirmed = min(row.computed + row.scheduled, len(self.prompt) + len(self.output))

    def append_output(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append sampled tokens up to and including the one that ends the request; drop the tokens after it.

        Returns the number of appended tokens, and the finish reason if the request has ended.
        """
        appended, max_output = 0, self.max_total_tokens - len(self.prompt)
        for token in tokens:
            self.output.append(token)
            appended += 1
            if token in self.stop_tokens:
                return appended, FinishReason.STOP
            if len(self.output) >= max_output:
                return appended, FinishReason.LENGTH
        return appended, None

    def reset_for_retract(self) -> None:
        """Return to WAITING after the pages were taken away; the next Start carries every token known now."""
        self.state = State.WAITING
        self.start_tokens = self.prompt + tuple(self.output)
        self.slot, self.lease = -1, None
        self.confirmed = self.bound = 0
        self.forced = ()
        self.published = self.decodes_only = False
        self.saved_positions, self.next_saved_position = (), NEVER
        self.retractions += 1
        self.match_version = -1
