"""The scheduler: accepts requests, makes plans, and turns results into outputs.

Owns the life cycle of every request: only the scheduler, its planner and its running batch change a request's state.
Must not know tensors, devices, processes or text. There is one scheduler per replica.

    add ─▶ WAITING ──admit──▶ RUNNING ──last token, abort, error──▶ ENDING ──no row in flight──▶ RELEASED
              ▲                  │
              └─────retract──────┘

There is no prefill phase and no decode phase (an idea from vLLM's V1 scheduler): each running request has a number
of computed tokens that has to catch up with its total, and a row computes the next part of the difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from srv.errors import InternalError
from srv.io.messages import Output
from srv.memory.cache import Cache
from srv.memory.groups import PageGroup
from srv.memory.snapshots import Snapshots
from srv.sched.draft_policy import AcceptanceRate, DraftHistory
from srv.sched.late import LateInputs, LateRow
from srv.sched.limits import Limits, SchedulerStats
from srv.sched.plan import Plan, Result, Row, RowResult
from srv.sched.planner import Planner
from srv.sched.queue import WaitingQueue
from srv.sched.request import Request, State
from srv.sched.row_check import check_row_result
from srv.sched.running_batch import RunningBatch
from srv.types import FinishReason, PoolingParams, RequestSpec, SamplingParams

__all__ = ["Limits", "Scheduler", "SchedulerStats"]

_TOKENS_ONLY = (None,) * 4  # of a RowResult: logprobs, scores, vectors and error


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0


class Scheduler:
    """`groups`: the pages of each cache group. `end_tokens`: the model's end-of-sequence tokens.

    `late(request)`: whether the rows of a request wait for late inputs; None: no request's rows do. `snapshots`: the
    slots for recurrent states of cached prefixes; None: the model has none.
    """

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[PageGroup],
        end_tokens: frozenset[int],
        late: Callable[[RequestSpec], bool] | None = None,
        snapshots: int | None = None,
    ) -> None:
        self.limits = limits
        self._late = late
        self._end_tokens = end_tokens
        snapshot_cache = None if snapshots is None else Snapshots(limits.max_running_requests + 1, snapshots)
        self._cache = Cache(groups, limits.prefix_cache, limits.most_unconfirmed, snapshot_cache)
        self._running = RunningBatch(self._cache, limits.max_running_requests, limits.save_interval)
        self._queue = WaitingQueue(
            limits.policy, lambda request: self._running.match(request).tokens, self._running.shares
        )
        self._planner = Planner(limits, self._running, self._queue)
        self._live: dict[str, Request] = {}  # requests whose last Output has not been produced yet
        self._late_live = 0  # those of them that wait for late inputs
        self._suspended: dict[str, Request] = {}
        self._in_flight: deque[tuple[Plan, tuple[Request, ...]]] = deque()
        self._acceptance = AcceptanceRate()
        self._arrivals = 0
        self._plans = 0
        self._counters = _Counters()

    # ---- requests of the API process

    def add(self, spec: RequestSpec) -> Output | None:
        """Queue a request. Returns an Output (ERROR, with code and message) if the request is refused."""
        request = Request(spec, self._arrivals, self.limits.context_length, self._end_tokens)
        error = self._admission_error(request)
        if error is not None:
            return _output(request, RowResult(-1, error=error), FinishReason.ERROR)
        self._arrivals += 1
        request.waits_for_late_inputs = self._late is not None and self._late(spec)
        self._begin_drafts(request)
        self._live[request.id] = request
        self._late_live += request.waits_for_late_inputs
        self._queue.push(request)
        return None

    def abort(self, requests: list[str] | None) -> list[Output]:
        """End these requests (None: all). `apply` returns the last Output of requests with rows in flight."""
        outputs: list[Output] = []
        for name in list(self._live) if requests is None else requests:
            request = self._live.get(name)
            if request is None or request.state is State.ENDING:
                continue
            if request.in_flight:
                request.state = State.ENDING
                request.abort_pending = True
            else:
                outputs.append(self._end(request, FinishReason.ABORT))
        return outputs

    def finish(self, request: str) -> None:
        """End a request because the API process found a stop string. The request gets no further Output."""
        ended = self._live.get(request)
        if ended is None:
            return
        if ended.state is State.ENDING:  # it was aborted before; its last Output is no longer needed
            ended.abort_pending = False
            self._forget(ended)
            self._counters.finished += 1
        else:
            self._end(ended, FinishReason.STOP)

    def retract_all(self) -> None:
        """Let all running requests wait without slots and pages. No step may be in flight."""
        assert not self._in_flight
        self._planner.retract_all()

    def flush(self) -> bool:
        """Clear the prefix cache. Returns False and does nothing while requests are running."""
        return self._cache.flush()

    # ---- calls of the engine loop
    def schedule(self) -> Plan | None:
        """The plan of the next step; None if nothing can be scheduled or `depth` steps are in flight."""
        if len(self._in_flight) >= self.limits.depth:
            return None
        step = self._planner.schedule_step()
        for request in step.admitted:
            if not request.retractions:
                request.cached_tokens = request.confirmed
                self._counters.prompt_tokens += len(request.prompt)
                self._counters.cached_tokens += request.confirmed
        if not (requests := step.requests):
            return None
        plan = step.build(self._plans, self._running.take_ended_slots(), self._late_live > 0)
        self._plans += 1
        self._in_flight.append((plan, requests))
        return plan

    def apply(self, plan: Plan, result: Result) -> list[Output]:
        """Process the result of the oldest plan in flight and return the outputs for its requests.

        Raises InternalError if the result does not match the plan in its step, rows, tokens or scores.
        """
        if result.step != plan.step or [row[0] for row in result.rows] != [row[0] for row in plan.rows]:  # the slots
            raise InternalError(f"the result of step {result.step} does not match the plan of step {plan.step}")
        return self._process_result(plan, result.rows)

    def late_rows(self, plan: Plan) -> list[LateRow]:
        """The rows of a plan that wait for late inputs, without those whose requests have ended.

        The plan must be the oldest one in flight, so that all tokens before it are known.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise InternalError(f"late inputs of step {plan.step} are made before the steps before it are applied")
        waiting = set(plan.late)
        return [
            LateRow(request.slot, request.spec, [*request.output, *row.jumped] if row.forced else request.output)
            for request, row in zip(self._in_flight[0][1], plan.rows, strict=True)
            if request.slot in waiting and request.state is State.RUNNING
        ]

    def jump(self, plan: Plan, late: LateInputs) -> None:
        """Let the rows that follow those of this plan, the latest one in flight, begin with what is forced."""
        forced = dict(late.forced)
        for request in self._in_flight[-1][1]:
            if request.slot in forced and request.state is State.RUNNING:
                request.forced = forced[request.slot]

    def settle(self, requests: Sequence[str]) -> None:
        """Rows of these requests wait for no late inputs from the next plan on."""
        for name in requests:
            request = self._live.get(name)
            if request is not None and request.waits_for_late_inputs:
                request.waits_for_late_inputs = False
                self._late_live -= 1
                self._begin_drafts(request)

    def suspend(self, requests: Sequence[str]) -> None:
        """Give these requests no row from the next plan on, until `resume`."""
        for name in requests:
            if (request := self._live.get(name)) is not None and request.state is State.RUNNING:
                request.suspended = True
                self._suspended[name] = request

    def resume(self, request: str) -> None:
        if (request_ := self._suspended.pop(request, None)) is not None:
            request_.suspended = False

    def suspended_rows(self) -> list[LateRow]:
        """The suspended requests whose outputs are known, as if each had a row."""
        return [
            LateRow(request.slot, request.spec, request.output)
            for request in self._suspended.values()
            if request.state is State.RUNNING and not request.in_flight
        ]

    @property
    def suspended(self) -> int:
        """How many requests would have a row but for `suspend`; one that was retracted waits for pages."""
        return sum(request.state is State.RUNNING for request in self._suspended.values())

    def _begin_drafts(self, request: Request) -> None:
        # Hidden states are those of known tokens, and the host, which makes late inputs, does not know drafts.
        if self.limits.drafts and request.next_vector_position is None and not request.waits_for_late_inputs:
            request.draft_history = DraftHistory(self._acceptance.value)

    def fail(self, plan: Plan, code: str, message: str) -> list[Output]:
        """The oldest plan failed as a whole: its requests end with ERROR, all others continue."""
        return self._process_result(plan, tuple(RowResult(row.slot, error=(code, message)) for row in plan.rows))

    def fail_request(self, request: str, code: str, message: str) -> list[Output]:
        """A running request cannot go on: it ends with ERROR now, and the result of its rows in flight is dropped."""
        failed = self._live.get(request)
        if failed is None or failed.state is not State.RUNNING:
            return []
        return [self._end(failed, FinishReason.ERROR, RowResult(failed.slot, error=(code, message)))]

    # ---- state
    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running and no step is in flight."""
        return not self._queue and not self._running and not self._in_flight

    @property
    def max_request_tokens(self) -> int:
        """Maximum prompt and output tokens of a request that can run (the last token needs no KV)."""
        pool = self._cache.max_tokens
        return self.limits.context_length if pool is None else min(self.limits.context_length, pool + 1)

    def stats(self) -> SchedulerStats:
        groups, states = self._cache.counts(), self._cache.snapshot_counts()
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._queue),
            pages_total=sum(group.total for group in groups),
            pages_free=sum(group.free for group in groups),
            pages_cached=sum(group.cached for group in groups),
            pages_held=sum(group.held for group in groups),
            state_slots_total=states.total,
            state_slots_cached=states.cached,
            state_slots_held=states.held,
            retractions=self._planner.retractions,
            **asdict(self._counters),
        )

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError, with the numbers, unless pages and slots add up. `deep` checks every page."""
        self._running.check_integrity(deep)

    # ---- internals

    def _admission_error(self, request: Request) -> tuple[str, str] | None:
        """The error code and message for the client if this request cannot be queued."""
        spec, prompt, limits = request.spec, len(request.prompt), self.limits
        if request.id in self._live:
            return (
                "duplicate_request",
                f"request {request.id}: another live request has this identifier; choose a different one",
            )
        if prompt == 0:
            return "empty_prompt", "the prompt has no tokens; at least one is needed"
        if (message := self._invalid_token(spec)) is not None:
            return "invalid_token_id", message
        if prompt + _min_output(spec) > limits.context_length:
            output_clause = " and at least one token of it must be left for the output" if _min_output(spec) else ""
            return (
                "context_length_exceeded",
                f"the prompt has {prompt} tokens, but the context length is {limits.context_length}{output_clause};"
                " shorten the prompt",
            )
        pool = self._cache.max_tokens
        if pool is not None and request.max_kv_tokens > pool:
            return (
                "exceeds_pool",
                f"{prompt} prompt tokens and up to {request.max_total_tokens - prompt} output tokens do not fit in the"
                f" KV pool, which holds {pool} tokens; ask for at most {self.max_request_tokens} tokens in all",
            )
        return self._queue_full(request)

    def _queue_full(self, request: Request) -> tuple[str, str] | None:
        """The error for one request too many. The sequences of a client request are one request, accepted together."""
        limit = self.limits.max_queued_requests
        if limit is None or len(self._queue) < limit or self._queue.knows(request):
            return None
        waiting = self._queue.not_started()
        if waiting < limit:
            return None
        return "queue_full", f"{waiting} requests are waiting, the limit is {limit}; try later"

    def _invalid_token(self, spec: RequestSpec) -> str | None:
        """The error message for a token id outside the vocabulary, which would fail the whole step on the device."""
        size, params = self.limits.vocab_size, spec.params
        if size is None:
            return None
        sources = [("prompt", spec.tokens)]
        if isinstance(params, SamplingParams):
            biased = tuple(token for token, _ in params.logit_bias)
            sources += [("stop_token_ids", params.stop_token_ids), ("logit_bias", biased)]
            sources += [("allowed_token_ids", params.allowed_token_ids)]
            sources += [("bad_words", ids) for ids in params.banned]
        for source, ids in sources:
            if ids and not 0 <= min(ids) <= max(ids) < size:
                bad = next(token for token in ids if not 0 <= token < size)
                return f"{source} contains token id {bad}, but the vocabulary is 0 to {size - 1}; leave it out"
        return None

    def _process_result(self, plan: Plan, results: Sequence[RowResult]) -> list[Output]:
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise InternalError(f"step {plan.step} is not the oldest step in flight")
        _, requests = self._in_flight.popleft()
        self._counters.steps += 1
        outputs: list[Output] = []
        running, add_output, appended = State.RUNNING, outputs.append, 0
        for request, row, result in zip(requests, plan.rows, results, strict=True):
            # A decode row that returns one token which does not end the request takes the short path, for its speed.
            if request.decodes_only and request.state is running and row[2] == 1 and result[2:] == _TOKENS_ONLY:
                tokens, length = result[1], request.confirmed + 2
                if len(tokens) == 1 and length < request.max_total_tokens and tokens[0] not in request.stop_tokens:
                    request.in_flight -= 1
                    request.output.append(tokens[0])
                    request.confirmed = length - 1
                    appended += 1
                    add_output(Output(request.id, list(tokens), None, None, None, None, request.cached_tokens))
                    continue
            output = self._process_row(request, row, result)
            if output is not None:
                add_output(output)
        self._counters.generated_tokens += appended
        return outputs

    def _process_row(self, request: Request, row: Row, result: RowResult) -> Output | None:
        request.in_flight -= 1
        request.drafts_in_flight -= row.drafts
        request.kv_invalid |= result.error is not None
        if request.state is State.ENDING:
            return self._handle_late_result(request, row)
        if result.error is not None:
            return self._end(request, FinishReason.ERROR, RowResult(row.slot, error=result.error))
        return self._apply_row(request, row, result)

    def _handle_late_result(self, request: Request, row: Row) -> Output | None:
        """The result of a request that has already ended: drop its tokens; release the pages with its last row."""
        request.drop(row)
        if request.in_flight:
            return None
        if request.abort_pending:
            return self._end(request, FinishReason.ABORT)
        self._running.release(request)
        return None

    def _apply_row(self, request: Request, row: Row, result: RowResult) -> Output | None:
        """Apply a row's result to a running request; returns the Output for the client, if there is one."""
        check_row_result(request, row, result)
        end = row.computed + row.scheduled
        if row.forced:
            result = result._replace(tokens=row.jumped + result.tokens)
        appended, reason = request.confirm(row, result.tokens)
        if row.drafts and request.draft_history is not None:
            request.draft_history.record(row.drafts, len(result.tokens) - 1)
            self._acceptance.record(row.drafts, len(result.tokens) - 1)
            self._counters.drafts_proposed += row.drafts
            self._counters.drafts_accepted += len(result.tokens) - 1
        self._counters.generated_tokens += appended
        if row.score:
            request.next_scored_position = min(end, len(request.prompt) - 1)
        pooled = isinstance(request.spec.params, PoolingParams)
        if row.vectors and not pooled:
            request.next_vector_position = end
        if request.confirmed >= request.max_total_tokens:  # nothing to sample: the prompt was scored or pooled
            reason = FinishReason.STOP if pooled else FinishReason.LENGTH
        self._running.publish(request)
        result = result._replace(tokens=result.tokens[:appended])
        if reason is not None:
            return self._end(request, reason, result)
        if result.tokens or result.scores or result.vectors:
            return _output(request, result)
        return None

    def _forget(self, request: Request) -> None:
        del self._live[request.id]
        self._suspended.pop(request.id, None)
        self._late_live -= request.waits_for_late_inputs

    def _end(self, request: Request, reason: FinishReason, result: RowResult | None = None) -> Output:
        """End a live request and return its last Output. Its pages are released now or with its last row in flight."""
        self._forget(request)
        request.abort_pending = False
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
            self._running.release(request)
        return _output(request, result, reason)


def _output(request: Request, result: RowResult | None = None, finish: FinishReason | None = None) -> Output:
    """The Output of a row's result, of which `tokens` are those that belong to the request."""
    if result is None:
        return Output(request.id, [], finish, cached_tokens=request.cached_tokens, scheduled_at=request.scheduled_at)
    tokens, logprobs, scores = result.tokens, result.logprobs, result.scores
    return Output(
        request=request.id,
        tokens=list(tokens),
        finish=finish,
        stop_token=tokens[-1] if finish is FinishReason.STOP and tokens else None,
        logprobs=None if logprobs is None else list(logprobs[: len(tokens)]),
        prompt_logprobs=list(scores) if scores else None,
        cached_tokens=request.cached_tokens,
        error=result.error,
        vectors=result.vectors,
        scheduled_at=request.scheduled_at,
    )


def _min_output(spec: RequestSpec) -> int:
    """1 if the request generates tokens, 0 if its prompt is only scored or pooled."""
    return 0 if isinstance(spec.params, PoolingParams) else min(spec.params.max_tokens, 1)
