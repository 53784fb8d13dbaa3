"""One request as the scheduler sees it: counters chasing one another.

Owns a request's tokens and counters. Must not know the queue, pages (a lease is opaque) or other requests.

    tokens    [ prompt ............ | output ..... ] ? ? ......
              0        computed     planned        total        most
                       results in   in plans       known + being sampled

`computed <= planned <= total <= most`: a request is scheduled while planned < total, and has nothing more
to sample when total == most.
"""

from __future__ import annotations

import enum

from srv.io.messages import Generate
from srv.memory.cache import Lease
from srv.memory.radix import Match
from srv.types import FinishReason


class State(enum.Enum):
    """WAITING -> RUNNING -> ENDING -> RELEASED; RUNNING -> WAITING by retraction; ENDING is skipped when idle."""

    WAITING = "waiting"  # in the queue, holds nothing
    RUNNING = "running"  # has a slot and a lease
    ENDING = "ending"  # gets no more work; slot and lease wait for rows in flight
    RELEASED = "released"


class Request:
    """`arrival` orders requests; `most` bounds prompt and output tokens together."""

    __slots__ = (
        "abort_due",
        "arrival",
        "cached_tokens",
        "computed",
        "id",
        "in_flight",
        "leader",
        "lease",
        "match",
        "match_version",
        "most",
        "namespace",
        "output",
        "overtaken",
        "pages_told",
        "params",
        "planned",
        "prompt",
        "published",
        "retractions",
        "sampling",
        "scored",
        "slot",
        "start_tokens",
        "state",
        "stops",
        "tainted",
    )

    def __init__(self, message: Generate, arrival: int, context_length: int, end_tokens: frozenset[int]) -> None:
        self.id = message.request
        self.params = message.params
        self.namespace = message.namespace
        self.prompt = tuple(message.tokens)
        self.arrival = arrival
        self.most = min(len(self.prompt) + self.params.max_tokens, context_length)
        stops = frozenset() if self.params.ignore_eos else end_tokens
        self.stops = stops.union(self.params.stop_token_ids) if self.params.stop_token_ids else stops

        self.state = State.WAITING
        self.output: list[int] = []
        self.start_tokens = self.prompt  # known when it (last) entered the queue: what its Start brings
        self.scored = self.first_score if self.params.prompt_logprobs is not None else len(self.prompt)
        self.cached_tokens = 0
        self.retractions = 0
        self.overtaken = 0
        self.match = Match(0, 0)
        self.match_version = -1
        self.leader: Request | None = None  # computes the prompt that this one waits for

        self.slot = -1
        self.lease: Lease | None = None
        self.pages_told = 0  # leading pages that have been in a plan
        self.computed = 0
        self.planned = 0
        self.sampling = 0  # samples in flight
        self.in_flight = 0  # plans in flight that have a row of it
        self.published = False  # the start tokens' full pages were offered to the prefix tree
        self.tainted = False  # its KV cannot be trusted: nothing more of it is shared
        self.abort_due = False  # ENDING, and its last Output is still to come

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.output) + self.sampling

    @property
    def most_computed(self) -> int:
        """Positions that could ever need KV: the last sampled token is not fed back."""
        return max(len(self.prompt), self.most - 1)

    @property
    def first_score(self) -> int:
        """The first position that is scored: the one before the first prompt token whose logprob is wanted."""
        return max(self.params.prompt_logprobs_start, 1) - 1

    @property
    def prefix_limit(self) -> int:
        """Tokens that a prefix hit may cover: one must be left to compute, and unscored ones must be computed."""
        limit = len(self.start_tokens) - 1
        return min(limit, self.scored) if self.scored < len(self.prompt) - 1 else limit

    def score_count(self, end: int) -> int:
        """`Row.score` of a row that computes [planned, end)."""
        begin = max(self.planned, self.scored)
        return end - begin if begin < min(end, len(self.prompt) - 1) else 0

    def computed_tokens(self) -> tuple[int, ...]:
        """Tokens whose KV is computed and final."""
        return () if self.tainted else (self.prompt + tuple(self.output))[: self.computed]

    def accept(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append sampled tokens up to the one that ends the request.

        Returns how many were taken, and the reason if that ended it. Tokens after the end are dropped.
        """
        taken, most_output = 0, self.most - len(self.prompt)
        for token in tokens:
            self.output.append(token)
            taken += 1
            if token in self.stops:
                return taken, FinishReason.STOP
            if len(self.output) >= most_output:
                return taken, FinishReason.LENGTH
        return taken, None

    def wait_again(self) -> None:
        """Back to the queue after its pages were taken: all that is known will be its next Start."""
        self.state = State.WAITING
        self.start_tokens = self.prompt + tuple(self.output)
        self.slot, self.lease = -1, None
        self.computed = self.planned = 0
        self.published = False
        self.retractions += 1
        self.match_version = -1
