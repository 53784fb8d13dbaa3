"""What one step of steady decode costs in the scheduler: `schedule` plus `apply`, with a long waiting queue.

    python tests/bench/scheduler.py [--running 256 1024 4096] [--queued 10000] [--drafts 3] [--draft-share 1]

Results are made up without a model, so the time is that of the scheduler alone. The median step counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

from srv.memory.groups import PageGroup
from srv.sched.limits import Limits
from srv.sched.plan import Plan, Result, Row, RowResult
from srv.sched.scheduler import Scheduler
from srv.types import RequestSpec, SamplingParams

PROMPT, OUTPUT, PAGE = 128, 4096, 16
WARM_UP = 5


def result_of(row: Row) -> RowResult:
    return RowResult(row.slot, (7,) * row.sample)


def request(number: int) -> RequestSpec:
    prompt = (number % 50_000, *range(1, PROMPT))
    return RequestSpec(id=f"r{number}", tokens=prompt, params=SamplingParams(max_tokens=OUTPUT, ignore_eos=True))


def scheduler_of(running: int, queued: int, drafts: int, share: float) -> Scheduler:
    """`share`: what a draft costs, as a fraction of a row without it."""
    limits = Limits(
        max_running_requests=running,
        max_queued_requests=None,
        chunked_prefill_size=8192,
        max_prefill_tokens=8192,
        context_length=PROMPT + OUTPUT,
        depth=2,
        drafts=drafts,
        step_seconds=((running, 1.0), (running * (1 + drafts), 1.0 + drafts * share)) if drafts else (),
    )
    pages = (running + 1) * (PROMPT + OUTPUT) // PAGE
    scheduler = Scheduler(limits, [PageGroup(pages, PAGE)], frozenset({2}))
    for number in range(running + queued):
        refused = scheduler.add(request(number))
        assert refused is None
    return scheduler


def step_ms(running: int, queued: int, steps: int, drafts: int = 0, share: float = 0.0) -> tuple[float, float]:
    """Median milliseconds of `schedule` and of `apply`, two steps in flight, once every slot decodes."""
    scheduler = scheduler_of(running, queued, drafts, share)
    flight: list[Plan] = []
    schedule: list[float] = []
    apply: list[float] = []
    while len(apply) < steps + WARM_UP:
        begin = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time() - begin
        if plan is not None:
            flight.append(plan)
            if len(flight) < 2:
                continue
        oldest = flight.pop(0)
        result = Result(oldest.step, tuple([result_of(row) for row in oldest.rows]))
        begin = time.thread_time()
        scheduler.apply(oldest, result)
        if len(oldest.rows) == running and not oldest.starts:
            apply.append(time.thread_time() - begin)
            schedule.append(scheduled)
    return 1e3 * statistics.median(schedule[WARM_UP:]), 1e3 * statistics.median(apply[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--drafts", type=int, default=0, help="per row; all are accepted")
    parser.add_argument("--draft-share", type=float, default=0.0, help="cost of a draft; from 1 on it never pays")
    options = parser.parse_args()
    for running in options.running:
        schedule, apply = step_ms(running, options.queued, options.steps, options.drafts, options.draft_share)
        print(
            f"{running:>5} running, {options.queued} queued: schedule {schedule:.2f} ms + apply {apply:.2f} ms"
            f" = {schedule + apply:.2f} ms per step"
        )


if __name__ == "__main__":
    main()
