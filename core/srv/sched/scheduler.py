"""Takes requests in, hands plans out, and turns results into outputs.

Owns the life of every request: with the planner and the roster that it drives, the only place where a
request changes state. Must not know tensors, devices, processes or text. One scheduler serves one replica.

    add ─▶ WAITING ──admit──▶ RUNNING ──last token, abort, error──▶ ENDING ──no row in flight──▶ RELEASED
              ▲                  │
              └─────retract──────┘

There is no prefill phase and no decode phase (the idea is that of vLLM's version 1 core): each running
request has computed tokens chasing total tokens, and a row is the next stretch of that chase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from srv.errors import InternalError
from srv.io.messages import Generate, Output
from srv.memory.cache import Cache
from srv.sched.limits import Limits, SchedulerStats
from srv.sched.plan import Plan, Result, Row, RowResult
from srv.sched.planner import Planner
from srv.sched.queue import WaitingQueue
from srv.sched.request import Request, State
from srv.sched.roster import Roster
from srv.types import FinishReason, TokenLogprob

__all__ = ["Limits", "Scheduler", "SchedulerStats"]


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0


class Scheduler:
    """`pages[group]` usable pages of each cache group; `end_tokens` are the model's own."""

    def __init__(self, limits: Limits, pages: Sequence[int], end_tokens: frozenset[int]) -> None:
        self.limits = limits
        self._end_tokens = end_tokens
        self._cache = Cache(pages, limits.page_size, limits.prefix_cache)
        self._roster = Roster(self._cache, limits.max_running_requests)
        self._queue = WaitingQueue(limits.policy, lambda request: self._roster.match(request).pages)
        self._planner = Planner(limits, self._roster, self._queue)
        self._live: dict[str, Request] = {}  # those whose last Output is still to come
        self._in_flight: deque[tuple[Plan, tuple[Request, ...]]] = deque()
        self._arrivals = 0
        self._plans = 0
        self._counters = _Counters()

    # ---- what the API process asks for

    def add(self, message: Generate) -> Output | None:
        """Queue a request. An Output (ERROR, with code and message) if it can never run or the queue is full."""
        request = Request(message, self._arrivals, self.limits.context_length, self._end_tokens)
        refusal = self._why_not(request)
        if refusal is not None:
            return _output(request, finish=FinishReason.ERROR, error=refusal)
        self._arrivals += 1
        self._live[request.id] = request
        self._queue.push(request)
        return None

    def abort(self, requests: list[str] | None) -> list[Output]:
        """End these requests (None: all). Those in flight get their last Output from `apply`."""
        outputs: list[Output] = []
        for name in list(self._live) if requests is None else requests:
            request = self._live.get(name)
            if request is None or request.state is State.ENDING:
                continue
            if request.in_flight:
                request.state = State.ENDING
                request.abort_due = True
            else:
                outputs.append(self._close(request, FinishReason.ABORT))
        return outputs

    def finish(self, request: str) -> None:
        """The API process saw a stop string: the request ends, and no further Output is sent for it."""
        ended = self._live.get(request)
        if ended is None:
            return
        if ended.state is State.ENDING:  # aborted meanwhile; its last Output is not wanted any more
            ended.abort_due = False
            del self._live[request]
            self._counters.finished += 1
        else:
            self._close(ended, FinishReason.STOP)

    def flush(self) -> bool:
        """Forget the prefix cache. False, and nothing done, while requests run."""
        return self._cache.flush()

    # ---- what the loop calls

    def schedule(self) -> Plan | None:
        """The next step; None if there is nothing to run now or `depth` steps are in flight."""
        if len(self._in_flight) >= self.limits.depth:
            return None
        step = self._planner.fill()
        for request in step.admitted:
            if not request.retractions:
                request.cached_tokens = request.computed
                self._counters.prompt_tokens += len(request.prompt)
                self._counters.cached_tokens += request.computed
        requests = step.requests
        if not requests:
            return None
        plan = step.plan(self._plans, self._roster.take_ended_slots())
        self._plans += 1
        self._in_flight.append((plan, requests))
        return plan

    def apply(self, plan: Plan, result: Result) -> list[Output]:
        """Take in the result of the oldest plan in flight.

        Raises InternalError when the result does not answer the plan: other rows, tokens or scores.
        """
        if result.step != plan.step or [row.slot for row in result.rows] != [row.slot for row in plan.rows]:
            raise InternalError(f"the result of step {result.step} does not answer the plan of step {plan.step}")
        return self._take_in(plan, result.rows)

    def fail(self, plan: Plan, code: str, message: str) -> list[Output]:
        """The executor failed on the whole oldest plan: its requests end with ERROR, all others live on."""
        return self._take_in(plan, tuple(RowResult(row.slot, error=(code, message)) for row in plan.rows))

    # ---- what may be asked

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._queue and not self._roster and not self._in_flight

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the largest request that can run (its last token needs no page)."""
        return min(self.limits.context_length, self._cache.total * self.limits.page_size + 1)

    def stats(self) -> SchedulerStats:
        groups = self._cache.counts()
        return SchedulerStats(
            running=len(self._roster),
            waiting=len(self._queue),
            pages_total=sum(group.total for group in groups),
            pages_free=sum(group.free for group in groups),
            pages_cached=sum(group.cached for group in groups),
            pages_held=sum(group.held for group in groups),
            retractions=self._planner.retractions,
            **asdict(self._counters),
        )

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError, with the numbers, unless pages and slots add up. `deep` looks at each page."""
        self._roster.check_integrity(deep)

    # ---- inside

    def _why_not(self, request: Request) -> tuple[str, str] | None:
        """Code and message for the client if this request cannot be queued."""
        prompt, limits = len(request.prompt), self.limits
        if request.id in self._live:
            return "duplicate_request", f"request {request.id}: a live request has this identifier; choose another"
        if prompt == 0:
            return "empty_prompt", "the prompt has no tokens; at least one is needed"
        if (foreign := self._foreign_token(request)) is not None:
            return "invalid_token_id", foreign
        if prompt + min(request.params.max_tokens, 1) > limits.context_length:
            return (
                "context_length_exceeded",
                f"the prompt has {prompt} tokens, but the context length is {limits.context_length},"
                " of which the output needs at least one; shorten the prompt",
            )
        needed = self._cache.pages_for(request.most_computed)
        if needed > self._cache.total:
            return (
                "exceeds_pool",
                f"{prompt} prompt tokens and up to {request.most - prompt} output tokens need {needed} pages of"
                f" {limits.page_size} tokens, but the KV pool has {self._cache.total};"
                f" ask for at most {self.max_request_tokens} tokens in all",
            )
        if limits.max_queued_requests is not None and len(self._queue) >= limits.max_queued_requests:
            return (
                "queue_full",
                f"{len(self._queue)} requests wait already, and at most {limits.max_queued_requests} may; try later",
            )
        return None

    def _foreign_token(self, request: Request) -> str | None:
        """What to say of a token id outside the vocabulary: on the device it would fail the whole step."""
        size, params = self.limits.vocab_size, request.params
        if size is None:
            return None
        biased = tuple(token for token, _ in params.logit_bias)
        for where, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", biased),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                bad = next(token for token in ids if not 0 <= token < size)
                return f"{where} holds token id {bad}, but the vocabulary is 0 to {size - 1}; leave it out"
        return None

    def _take_in(self, plan: Plan, results: Sequence[RowResult]) -> list[Output]:
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise InternalError(f"step {plan.step} is not the oldest step in flight")
        _, requests = self._in_flight.popleft()
        self._counters.steps += 1
        outputs: list[Output] = []
        for request, row, result in zip(requests, plan.rows, results, strict=True):
            request.in_flight -= 1
            request.sampling -= row.sample
            request.tainted |= result.error is not None
            if request.state is State.ENDING:
                output = self._after_the_end(request, row)
            elif result.error is not None:
                output = self._close(request, FinishReason.ERROR, error=result.error)
            else:
                output = self._advance(request, row, result)
            if output is not None:
                outputs.append(output)
        return outputs

    def _after_the_end(self, request: Request, row: Row) -> Output | None:
        """A row of a request that was over before: its tokens are dropped, the last one sets the pages free."""
        request.computed = row.computed + row.scheduled
        if request.in_flight:
            return None
        if request.abort_due:
            return self._close(request, FinishReason.ABORT)
        self._roster.release(request)
        return None

    def _advance(self, request: Request, row: Row, result: RowResult) -> Output | None:
        """What the row brought a running request, and what its client is to hear of it."""
        _check_answer(request, row, result)
        end = row.computed + row.scheduled
        taken, reason = request.accept(result.tokens)
        accepted_drafts = max(0, taken - 1)  # their KV was computed with the row
        request.computed = end + accepted_drafts
        request.planned += accepted_drafts
        self._counters.generated_tokens += taken
        if row.score:
            request.scored = min(end, len(request.prompt) - 1)
        if request.computed >= request.most:  # nothing was to be sampled, only the prompt to be scored
            reason = FinishReason.LENGTH
        self._roster.publish(request)
        tokens = result.tokens[:taken]
        if reason is not None:
            return self._close(request, reason, tokens, result.logprobs, result.scores)
        if tokens or result.scores:
            return _output(request, tokens, result.logprobs, result.scores)
        return None

    def _close(
        self,
        request: Request,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        scores: tuple[TokenLogprob, ...] | None = None,
        error: tuple[str, str] | None = None,
    ) -> Output:
        """The last Output of a live request. What it holds is released now, or when its last row has landed."""
        del self._live[request.id]
        request.abort_due = False
        if reason is FinishReason.ABORT:
            self._counters.aborted += 1
        else:
            self._counters.finished += 1
        if request.state is State.WAITING:
            self._queue.remove(request)
            request.state = State.RELEASED
        elif request.in_flight:
            request.state = State.ENDING
        else:
            self._roster.release(request)
        return _output(request, tokens, logprobs, scores, reason, error)


def _output(
    request: Request,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] | None = None,
    scores: tuple[TokenLogprob, ...] | None = None,
    finish: FinishReason | None = None,
    error: tuple[str, str] | None = None,
) -> Output:
    return Output(
        request=request.id,
        tokens=list(tokens),
        finish=finish,
        stop_token=tokens[-1] if finish is FinishReason.STOP and tokens else None,
        logprobs=None if logprobs is None else list(logprobs[: len(tokens)]),
        prompt_logprobs=list(scores) if scores else None,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        error=error,
    )


def _check_answer(request: Request, row: Row, result: RowResult) -> None:
    """Raises InternalError unless the row brought as many tokens and scores as the plan asked for."""
    least, most = (1, 1 + row.lookahead) if row.sample else (0, 0)
    end = row.computed + row.scheduled
    scores = min(end, len(request.prompt) - 1) - (end - row.score) if row.score else 0
    if not least <= len(result.tokens) <= most or len(result.scores or ()) != scores:
        raise InternalError(
            f"request {request.id}: a row of positions {row.computed}..{end - 1} brought {len(result.tokens)} tokens"
            f" and {len(result.scores or ())} scores; {least} to {most} tokens and {scores} scores were due"
        )
