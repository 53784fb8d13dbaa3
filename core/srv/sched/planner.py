"""Chooses the work of the next step: rows for running requests, admission of waiting ones, retraction.

Owns that choice. Must not know results or messages.

When pages run out, the newest sequence of the client request that holds most slots gives up its pages; if no client
request holds several, the latest-arrived running request does. A request with rows in flight cannot give up its pages
yet; it gets no row in this step, so that it can be retracted once its last result has arrived. The earliest running
request therefore always makes progress (or, if it is the only one left, waits until the ending requests have released
their pages, and then fits alone), and every request finishes.

A client request of which no sequence runs gets its first slot, and the pages for it, from whoever holds more than a
fair share (`srv.sched.shares`). The prompt tokens of a step are shared evenly among the client requests that need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from srv.errors import IntegrityError
from srv.memory.radix import Match
from srv.sched.draft_policy import DraftCost, allows_trial
from srv.sched.limits import Limits
from srv.sched.plan import Plan, Row, Start
from srv.sched.queue import WaitingQueue
from srv.sched.request import Claimant, Request, State
from srv.sched.reserve import OutputReserve
from srv.sched.running_batch import RunningBatch, lease_of
from srv.sched.shares import Donors, newest_of_largest, split_evenly


@dataclass(slots=True)
class PlanBuilder:
    """A plan under construction. `budget`: tokens of prompts and drafts that may still be scheduled in this step.

    `draft_budget`: how many of them may be drafts, so that drafts never keep prompts waiting. Jumped tokens count as
    drafts. `draft_share`: what a draft costs (`DraftCost.share`). `draft_trial`: whether requests may try a draft.
    `quotas`: how many of the budget's prompt tokens each of these client requests may still have.
    """

    budget: int
    draft_budget: int
    draft_share: float
    draft_trial: bool
    quotas: dict[Claimant, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    decode_rows: list[Row] = field(default_factory=list)
    extend: list[Request] = field(default_factory=list)
    extend_rows: list[Row] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempt_next: set[Request] = field(default_factory=set)  # get no row, so that they can be retracted in a later step
    out_of_pages: bool = False  # pages ran out: no request is admitted in this step

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests of the plan's rows, in the same order: decode rows first."""
        return tuple(self.decode + self.extend)

    def build(self, number: int, ends: tuple[int, ...], any_late: bool) -> Plan:
        """`any_late`: whether there may be requests that wait for late inputs."""
        rows = tuple(self.decode_rows + self.extend_rows)
        late: tuple[int, ...] = ()
        if any_late:
            pairs = zip(self.requests, rows, strict=True)
            late = tuple([row.slot for request, row in pairs if request.waits_for_late_inputs and row.sample])
        return Plan(number, tuple(self.starts), rows, ends, late)


class Planner:
    """Plans steps from the running batch and the waiting queue. `retractions` counts since start."""

    def __init__(self, limits: Limits, running: RunningBatch, queue: WaitingQueue) -> None:
        self._limits = limits
        self._running = running
        self._queue = queue
        self._reserve = OutputReserve(limits.conservativeness)
        self._draft_cost = DraftCost(limits.step_seconds, limits.drafts)
        self._yielding: dict[Request, None] = {}  # give up their slots when their last rows have landed
        self._unfinished: list[Request] = []  # the last step left a part of their prompts
        self.retractions = 0
        self._steps = 0

    def schedule_step(self) -> PlanBuilder:
        """Choose the rows of the next step. From here on, the requests in it count as in flight."""
        chunk = self._limits.chunked_prefill_size
        budget = chunk if chunk > 0 else self._limits.max_prefill_tokens
        self._steps += 1
        drafts = self._limits.drafts > 0
        share = self._draft_cost.share(len(self._running)) if drafts else 1.0
        step = PlanBuilder(budget, budget // 2, share, drafts and allows_trial(self._steps, share))
        self._retract_yielding(step)
        self._free_slots(step)
        if chunk > 0 and self._unfinished:
            self._share_prompt_tokens(step)
        self._unfinished.clear()
        self._schedule_all_running(step)
        self._admit_waiting(step)
        if step.decode:
            self._reserve.decay()
        return step

    # ---- running requests

    def _schedule_all_running(self, step: PlanBuilder) -> None:
        """In order of arrival. Decode rows without drafts that need no new page take the short path, for its speed."""
        running, no_pages = State.RUNNING, self._running.cache.no_pages
        add_request, add_row = step.decode.append, step.decode_rows.append
        preempt_next = step.preempt_next
        for request in tuple(self._running):
            if request.state is not running or request.suspended or (preempt_next and request in preempt_next):
                continue
            begin, history = request.bound, request.draft_history
            if (
                request.decodes_only
                and request.total < request.max_total_tokens
                and begin < request.capacity
                and begin + 1 < request.next_saved_position
                and not request.drafts_in_flight
                and not request.forced
                and (history is None or history.pauses(step.draft_share, step.draft_trial))
            ):
                add_row(Row(request.slot, begin, 1, 1, no_pages))
                add_request(request)
                request.bound = begin + 1
                request.total += 1
                request.in_flight += 1
            else:
                self._schedule_running(request, step)

    def _schedule_running(self, request: Request, step: PlanBuilder) -> None:
        """Add the next row of a running request if it has work left and there are budget and pages for it."""
        if self._running.cache.has_windows:
            self._running.trim(request)
        prompt_left = len(request.start_tokens) - request.bound
        if prompt_left > 0:
            to_saved = request.next_saved_position - request.bound  # a row ends where recurrent states are saved
            count = min(self._prompt_chunk(request, prompt_left, step), to_saved)
            if count < prompt_left:
                self._unfinished.append(request)
            if count and self._ensure_pages(request, request.bound + count, step):
                self._add_row(request, count, 0, step)
        elif request.total < request.max_total_tokens:
            if request.drafts_in_flight and not self._limits.device_lengths:
                return  # the number of accepted drafts in flight decides where the next row begins
            jumped = self._jump_count(request, step) if request.forced else 0
            drafts = 0 if jumped else self._draft_count(request, step)
            count = 1 + jumped + drafts
            if self._ensure_pages(request, request.bound + count, step):
                self._add_row(request, count, drafts, step, jumped)

    def _draft_count(self, request: Request, step: PlanBuilder) -> int:
        """How many drafts the next decode row has: as many as pay and fit in the budget, the output and the pages."""
        history = request.draft_history
        if history is None or history.pauses(step.draft_share, step.draft_trial):
            return 0
        return history.next_count(step.draft_share, self._room(request, self._limits.drafts, step))

    def _jump_count(self, request: Request, step: PlanBuilder) -> int:
        """How many forced tokens the next decode row computes after the last known one: all that fit, if they pay."""
        to_saved = request.next_saved_position - request.bound - 1  # a row ends where recurrent states are saved
        count = self._room(request, min(len(request.forced) - 1, to_saved), step)
        return count if count > 0 and self._draft_cost.jump_pays(len(self._running), count) else 0

    def _room(self, request: Request, most: int, step: PlanBuilder) -> int:
        """How many tokens beyond the last known one fit in the budget, the output and the pages: at most `most`."""
        remaining = request.max_total_tokens - request.total - 1
        limit = min(most, step.draft_budget, step.budget, remaining)
        while limit > 0 and not self._running.can_extend(request, request.bound + 1 + limit):
            limit //= 2
        return limit

    def _prompt_chunk(self, request: Request, prompt_left: int, step: PlanBuilder) -> int:
        """How many of a prompt's remaining tokens this step computes."""
        if self._limits.chunked_prefill_size > 0 or prompt_left <= step.budget:
            limit = step.quotas.get(request.claimant, step.budget) if step.quotas else step.budget
            return min(prompt_left, limit, step.budget)
        return 0 if step.extend else prompt_left  # without chunking, a prompt longer than the budget runs alone

    def _add_row(self, request: Request, count: int, drafts: int, step: PlanBuilder, jumped: int = 0) -> None:
        begin, end = request.bound, request.bound + count
        new_pages = self._running.extend(request, end)
        reaches_last = end - drafts - jumped == request.total < request.max_total_tokens
        sample = 1 + drafts if reaches_last else 0
        vectors = 0 if request.next_vector_position is None else request.vector_count(end)
        is_prompt = begin < len(request.start_tokens)
        score = request.score_count(end) if is_prompt else 0
        saved, in_flight = 0, request.drafts_in_flight
        if end == request.next_saved_position:
            saved = self._running.save(request, end)
        forced = request.forced[:count] if jumped else ()
        row = Row(
            request.slot,
            begin,
            count,
            sample,
            new_pages,
            score=score,
            vectors=vectors,
            drafts=drafts,
            drafts_in_flight=in_flight,
            saved=saved,
            forced=forced,
        )
        (step.extend if is_prompt else step.decode).append(request)
        (step.extend_rows if is_prompt else step.decode_rows).append(row)
        step.budget -= count if is_prompt else drafts + jumped
        if is_prompt and request.claimant in step.quotas:
            step.quotas[request.claimant] -= count
        step.draft_budget -= drafts + jumped
        request.schedule(row)

    # ---- when pages run out

    def _ensure_pages(self, request: Request, tokens: int, step: PlanBuilder) -> bool:
        """Whether the first `tokens` positions can get pages now; retracts later requests if necessary."""
        while not self._running.can_extend(request, tokens):
            step.out_of_pages = True
            victim = self._victim(step)
            if victim.in_flight:
                if victim.arrival < request.arrival and not self._yielding:  # it may have a row in this step already
                    self._yielding[victim] = None
                step.preempt_next.add(victim)
                return False
            alone = len(self._running) == 1
            if alone and not any(lease_of(victim).duplicates):
                raise IntegrityError(
                    f"request {request.id} runs alone and needs pages for {tokens} tokens, but they do not fit:"
                    f" {self._running.cache.counts()}"
                )
            self._retract_for_pages(victim)
            if victim is request:
                step.out_of_pages = not alone  # alone, it has freed its duplicate pages and may restart in this step
                return False
        return True

    def _victim(self, step: PlanBuilder) -> Request:
        """The running request that gives up its pages, of those not in `preempt_next`, which the caller's is not."""
        candidates = [one for one in self._running if one.state is State.RUNNING and one not in step.preempt_next]
        return newest_of_largest(candidates)

    def _retract_for_pages(self, request: Request) -> None:
        """Retract a request because pages ran out: more of them should have been reserved."""
        active = [other for other in self._running if other.state is State.RUNNING]
        self._reserve.raise_after_retraction(
            generated=sum(len(other.output) for other in active),
            allowed=sum(other.max_total_tokens - len(other.prompt) for other in active),
            requests=len(active),
        )
        self._retract(request)

    def _retract(self, request: Request) -> None:
        """Take slot and pages from a running request and requeue it at the front; it resumes where it stopped."""
        self._running.release(request)
        request.reset_for_retract()
        self._queue.push_front(request)
        self.retractions += 1

    def retract_all(self) -> None:
        """Retract all running requests, none of which may have a row in flight; the earliest is first in the queue."""
        self._yielding.clear()
        for request in reversed([one for one in self._running if one.state is State.RUNNING]):
            self._retract(request)

    # ---- fair shares

    def _retract_yielding(self, step: PlanBuilder) -> None:
        """Retract the requests that give up their slots and have no row in flight; the others get no row."""
        for request in tuple(self._yielding):
            if request.state is State.RUNNING and request.in_flight:
                step.preempt_next.add(request)
                continue
            del self._yielding[request]
            if request.state is State.RUNNING:
                self._retract(request)

    def _free_slots(self, step: PlanBuilder) -> None:
        """Without a free slot, have one given up for each client request that runs no sequence and can start now."""
        if self._running.has_free_slot or self._yielding or not self._queue:
            return
        if not self._running.shares.can_give(self._queue.owners):
            return
        donors, budget = Donors(self._running.shares, self._running), step.budget
        for request in self._queue.heads():
            if budget <= 0:
                break
            if self._running.must_wait(request):
                continue
            donor = donors.next_for(request)
            if donor is None:
                continue
            donors.receive(request)
            budget -= len(request.start_tokens)
            self._give_up(donor, step)

    def _free_pages(self, request: Request, missing: list[int], step: PlanBuilder) -> None:
        """Have `missing[group]` pages given up for the first sequence of a client request, if they can be."""
        if self._yielding or request.claimant in self._running.shares.groups:
            return
        donors, given_up = Donors(self._running.shares, self._running), []
        while max(missing) > 0:
            donor = donors.next_for(request)
            if donor is None:
                return
            given_up.append(donor)
            lease, growth = lease_of(donor), [0] * len(missing)
            self._add_growth(donor, growth)
            for group, page_count in enumerate(lease.held):
                of_prompt = len(donor.prompt) // self._running.cache.groups[group].page_size
                missing[group] -= growth[group] + max(0, page_count - of_prompt)
        for donor in given_up:
            self._give_up(donor, step)

    def _give_up(self, request: Request, step: PlanBuilder) -> None:
        if request.in_flight:
            self._yielding[request] = None
            step.preempt_next.add(request)
        else:
            self._retract(request)

    def _share_prompt_tokens(self, step: PlanBuilder) -> None:
        """Limit unfinished prompts to even shares of the step, if there are several or other requests begin."""
        demand: dict[Claimant, int] = {}
        for request in self._unfinished:
            if request.state is State.RUNNING:
                uncomputed = len(request.start_tokens) - request.bound
                demand[request.claimant] = demand.get(request.claimant, 0) + uncomputed
        if not demand:
            return
        if self._running.has_free_slot:
            begin = 0
            for request in self._queue.heads():
                if begin >= step.budget:
                    break
                demand[request.claimant] = len(request.start_tokens)
                begin += len(request.start_tokens)
        if len(demand) > 1:
            step.quotas = split_evenly(step.budget, demand)
            first = next(iter(demand))  # runs, so it advances whether or not others can begin
            step.quotas[first] = max(1, step.quotas[first])

    # ---- waiting requests

    def _admit_waiting(self, step: PlanBuilder) -> None:
        if step.out_of_pages or step.budget <= 0 or not self._queue or not self._running.has_free_slot:
            return
        if not self._running:
            self._reserve.reset()
        growth = [0] * len(self._running.cache.groups)
        for request in self._running:
            self._add_growth(request, growth)
        for request in self._queue.candidates(self._running.must_wait):
            hit = self._running.match(request)
            missing = len(request.start_tokens) - hit.tokens
            count = self._prompt_chunk(request, missing, step)
            if not count or not self.can_admit(request, hit, growth):
                if count and self._running.has_free_slot:
                    self._free_pages(request, self._missing_pages(request, hit, growth), step)
                break
            self._admit(request, step)
            count = min(count, request.next_saved_position - request.bound)
            if count < missing:
                self._unfinished.append(request)
            self._add_row(request, count, 0, step)
            self._add_growth(request, growth)

    def can_admit(self, request: Request, hit: Match, growth: Sequence[int]) -> bool:
        """Whether there is a slot, and pages for its prompt, its expected output and the expected `growth` of others.

        growth: pages in each cache group.

        This always holds when no request is running, because `Scheduler.add` refuses requests that cannot run alone.
        """
        if not self._running.has_free_slot:
            return False
        return max(self._missing_pages(request, hit, growth)) <= 0

    def _missing_pages(self, request: Request, hit: Match, growth: Sequence[int]) -> list[int]:
        """How many pages of each cache group are missing to admit a request; negative: how many are left."""
        cache = self._running.cache
        needed = cache.growth(hit, self._expected_tokens(request))
        pages = zip(needed, growth, cache.available, hit.unlocked, strict=True)
        return [own_need + others - (available - unlocked) for own_need, others, available, unlocked in pages]

    def _admit(self, request: Request, step: PlanBuilder) -> None:
        self._queue.take(request)
        step.starts.append(self._running.admit(request))
        step.admitted.append(request)

    def _add_growth(self, request: Request, growth: list[int]) -> None:
        """Add to `growth[group]` the pages that a running request is expected to need beyond those that it holds."""
        if request.state is State.RUNNING:
            missing = self._running.cache.growth(lease_of(request), self._expected_tokens(request))
            for group, count in enumerate(missing):
                growth[group] += count

    def _expected_tokens(self, request: Request) -> int:
        """KV positions that a request is expected to need: its known tokens and a share of its remaining output."""
        remaining = request.max_total_tokens - request.total
        return min(request.total + self._reserve.expected_tokens(remaining), request.max_kv_tokens)
