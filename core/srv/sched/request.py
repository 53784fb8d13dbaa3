"""One request as the scheduler sees it: its tokens and its counters.

Owns a request's tokens and counters. Must not know the queue, pages (a lease is opaque) or other requests.

    tokens    [ prompt ............ | output ..... ] ? ? ......
              0        computed     planned        total        max_total_tokens
                       in results   in plans       known + being sampled

`computed <= planned <= total <= max_total_tokens`: a request can be scheduled while planned < total, and nothing is
left to sample when total == max_total_tokens.
"""

from __future__ import annotations

import enum

from srv.memory.cache import Lease
from srv.memory.radix import Match
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec


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
        "cached_tokens",
        "computed",
        "id",
        "in_flight",
        "kv_invalid",
        "lease",
        "match",
        "match_version",
        "max_total_tokens",
        "next_scored_position",
        "next_vector_position",
        "num_pages_sent",
        "output",
        "planned",
        "prefix_producer",
        "prompt",
        "published",
        "retractions",
        "sampling",
        "slot",
        "spec",
        "start_tokens",
        "state",
        "stop_tokens",
        "times_bypassed",
    )

    def __init__(self, spec: RequestSpec, arrival: int, context_length: int, end_tokens: frozenset[int]) -> None:
        self.id = spec.id
        self.spec = spec
        self.prompt = spec.tokens
        self.arrival = arrival
        self.stop_tokens: frozenset[int] = frozenset()
        self.next_scored_position = len(self.prompt)
        # The first position whose hidden state is still needed, to be pooled or returned; None: none ever.
        self.next_vector_position: int | None = None
        params = spec.params
        if isinstance(params, PoolingParams):
            self.max_total_tokens = len(self.prompt)
            self.next_vector_position = 0 if params.pooling is Pooling.MEAN else len(self.prompt) - 1
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
        self.match = Match(0, 0)
        self.match_version = -1
        self.prefix_producer: Request | None = None  # the running request whose prompt this one waits for

        self.slot = -1
        self.lease: Lease | None = None
        self.num_pages_sent = 0  # leading pages that a plan has already carried to the runner
        self.computed = 0
        self.planned = 0
        self.sampling = 0  # rows in flight that sample a token
        self.in_flight = 0  # rows in flight
        self.published = False  # the full pages of the start tokens were offered to the prefix tree
        self.kv_invalid = False  # a row failed, so its KV must not be shared
        self.abort_pending = False  # aborted and ENDING; its last Output is sent when its rows have finished

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.output) + self.sampling

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
        """`Row.score` of a row that computes [planned, end)."""
        begin = max(self.planned, self.next_scored_position)
        return end - begin if begin < min(end, len(self.prompt) - 1) else 0

    def vector_count(self, end: int) -> int:
        """`Row.vectors` of a row that computes [planned, end); 0 unless hidden states are still needed."""
        return 0 if self.next_vector_position is None else max(0, end - max(self.planned, self.next_vector_position))

    def computed_tokens(self) -> tuple[int, ...]:
        """Tokens whose KV is computed and valid."""
        return () if self.kv_invalid else (self.prompt + tuple(self.output))[: self.computed]

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
        self.computed = self.planned = 0
        self.published = False
        self.retractions += 1
        self.match_version = -1
