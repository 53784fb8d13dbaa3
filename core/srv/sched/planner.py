"""What the next step computes: rows for those who run, admission of those who wait, retraction.

Owns the choice of work. Must not know results or messages.

Who yields when pages run out: requests are served in order of arrival, and the latest-arrived running
request gives its pages up, never an earlier one. One that is in flight cannot give up yet; it gets no row
in this step, so that its next result sets it free. Hence the earliest of the running requests always advances
(or, the last one left, waits for those that are ending, then fits alone), and every request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from srv.errors import IntegrityError
from srv.memory.radix import Match
from srv.sched.limits import Limits
from srv.sched.plan import Plan, Row, Start
from srv.sched.queue import WaitingQueue
from srv.sched.request import Request, State
from srv.sched.reserve import OutputReserve
from srv.sched.roster import Roster, lease_of


@dataclass(slots=True)
class Step:
    """A plan while it is being made. `budget`: prompt tokens that may still be scheduled."""

    budget: int
    starts: list[Start] = field(default_factory=list)
    decode: list[tuple[Request, Row]] = field(default_factory=list)
    extend: list[tuple[Request, Row]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    barred: set[Request] = field(default_factory=set)  # get no row, so that they can be retracted next time
    short: bool = False  # pages ran out: nobody is admitted

    @property
    def requests(self) -> tuple[Request, ...]:
        """In the order of the plan's rows: decode rows first."""
        return tuple(request for request, _ in self.decode + self.extend)

    def plan(self, number: int, ends: tuple[int, ...]) -> Plan:
        return Plan(number, tuple(self.starts), tuple(row for _, row in self.decode + self.extend), ends)


class Planner:
    """Fills steps from the roster and the queue. `retractions` counts since start."""

    def __init__(self, limits: Limits, roster: Roster, queue: WaitingQueue) -> None:
        self._limits = limits
        self._roster = roster
        self._queue = queue
        self._reserve = OutputReserve(limits.conservativeness)
        self.retractions = 0

    def fill(self) -> Step:
        """Choose the rows of the next step; the requests in it are counted as in flight from here on."""
        chunk = self._limits.chunked_prefill_size
        step = Step(chunk if chunk > 0 else self._limits.max_prefill_tokens)
        for request in tuple(self._roster):
            if request.state is State.RUNNING and request not in step.barred:
                self._continue(request, step)
        self._admit_waiting(step)
        if step.decode:
            self._reserve.decay()
        return step

    # ---- those who run

    def _continue(self, request: Request, step: Step) -> None:
        """Give a running request its next row if there is work, budget and room for it."""
        prompt_left = len(request.start_tokens) - request.planned
        if prompt_left > 0:
            count = self._prompt_share(prompt_left, step)
            if count and self._secure(request, request.planned + count, step):
                self._add_row(request, count, 0, step)
        elif (left := request.most - request.total) > 0:
            if self._limits.lookahead and request.sampling:
                return  # where the next row begins is known only when the tokens in flight are
            lookahead = min(self._limits.lookahead, left - 1)
            if self._secure(request, request.planned + 1 + lookahead, step):
                self._add_row(request, 1, lookahead, step)

    def _prompt_share(self, prompt_left: int, step: Step) -> int:
        """How many of a prompt's remaining tokens this step takes."""
        if self._limits.chunked_prefill_size > 0 or prompt_left <= step.budget:
            return min(prompt_left, step.budget)
        return 0 if step.extend else prompt_left  # whole prompts: one longer than the budget goes alone

    def _add_row(self, request: Request, count: int, lookahead: int, step: Step) -> None:
        begin, end = request.planned, request.planned + count
        new = self._roster.extend(request, end + lookahead)
        sample = end == request.total and end < request.most
        if begin < len(request.start_tokens):
            row = Row(request.slot, begin, count, sample, new, request.score_count(end), lookahead)
            step.extend.append((request, row))
            step.budget -= count
        else:
            step.decode.append((request, Row(request.slot, begin, count, sample, new, lookahead=lookahead)))
        request.planned = end
        request.in_flight += 1
        request.sampling += sample

    # ---- when pages run out

    def _secure(self, request: Request, tokens: int, step: Step) -> bool:
        """Make sure that the first `tokens` positions can have pages, retracting later requests if need be."""
        while not self._roster.can_extend(request, tokens):
            step.short = True
            victim = self._latest(step)
            if victim.in_flight:
                step.barred.add(victim)
                return False
            alone = len(self._roster) == 1
            if alone and not lease_of(victim).spare[0]:
                raise IntegrityError(
                    f"request {request.id} runs alone and needs pages for {tokens} tokens, but only"
                    f" {self._roster.cache.available} of {self._roster.cache.total} pages can be had"
                )
            self._retract(victim)
            if victim is request:
                step.short = not alone  # alone, what it held twice is free now: it may start again in this step
                return False
        return True

    def _latest(self, step: Step) -> Request:
        """The latest-arrived running request that is not barred; the one that asks is such a request itself."""
        return next(one for one in reversed(self._roster) if one.state is State.RUNNING and one not in step.barred)

    def _retract(self, request: Request) -> None:
        """Take slot and pages from a running request; it waits at the front and resumes where it was."""
        active = [other for other in self._roster if other.state is State.RUNNING]
        self._reserve.retracted(
            generated=sum(len(other.output) for other in active),
            allowed=sum(other.most - len(other.prompt) for other in active),
            requests=len(active),
        )
        self._roster.release(request)
        request.wait_again()
        self._queue.push_front(request)
        self.retractions += 1

    # ---- those who wait

    def _admit_waiting(self, step: Step) -> None:
        if step.short or step.budget <= 0 or not self._queue or not self._roster.has_free_slot:
            return
        if not self._roster:
            self._reserve.reset()
        growth = sum(self._growth(request) for request in self._roster)
        for request in self._queue.candidates(self._roster.is_held):
            hit = self._roster.match(request)
            count = self._prompt_share(len(request.start_tokens) - hit.pages * self._limits.page_size, step)
            if not count or not self.can_admit(request, hit, growth):
                break
            self._admit(request, step)
            self._add_row(request, count, 0, step)
            growth += self._growth(request)

    def can_admit(self, request: Request, hit: Match, growth: int) -> bool:
        """Whether there is a slot, and pages for its prompt, its expected output and the others' `growth`.

        There always are when nobody runs, since what cannot run alone is refused before it waits.
        """
        if not self._roster.has_free_slot:
            return False
        cache = self._roster.cache
        needed = cache.pages_for(self._expected_tokens(request)) - hit.pages
        return needed + growth <= cache.available - hit.unlocked

    def _admit(self, request: Request, step: Step) -> None:
        self._queue.take(request)
        step.starts.append(self._roster.admit(request))
        step.admitted.append(request)

    def _growth(self, request: Request) -> int:
        """Pages that a running request is expected to take yet."""
        if request.state is not State.RUNNING:
            return 0
        return max(0, self._roster.cache.pages_for(self._expected_tokens(request)) - lease_of(request).pages)

    def _expected_tokens(self, request: Request) -> int:
        """Positions that a request is expected to need: what is known, and a share of what may come."""
        return min(request.total + self._reserve.expect(request.most - request.total), request.most_computed)
