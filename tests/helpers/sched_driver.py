"""A minimal engine loop (schedule, submit, apply) over the fake executor, for the scheduler's tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from fake_ranks import FakeRanks

from srv.io.messages import Output
from srv.memory.groups import PageGroup
from srv.sched.late import LateInputs, LateRow
from srv.sched.plan import Plan, Result
from srv.sched.scheduler import Limits, Scheduler
from srv.testing.fake_executor import FakeExecutor
from srv.types import Pooling, PoolingParams, RequestSpec, SamplingParams

END = 49  # the model's end-of-sequence token in these tests; the fake executor's vocabulary is 0..49


def limits(**changes: object) -> Limits:
    values: dict[str, object] = {
        "max_running_requests": 8,
        "max_queued_requests": None,
        "chunked_prefill_size": 512,
        "max_prefill_tokens": 512,
        "context_length": 1000,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def message(request: str, prompt: list[int], max_tokens: int = 8, namespace: str = "", **params: object) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})  # type: ignore[arg-type]
    return RequestSpec(id=request, tokens=tuple(prompt), params=sampling, namespace=namespace)


def embedding(request: str, prompt: list[int], pooling: Pooling, namespace: str = "") -> RequestSpec:
    return RequestSpec(id=request, tokens=tuple(prompt), params=PoolingParams(pooling=pooling), namespace=namespace)


def next_of(token: int) -> int:
    """The only token that may follow `token` in requests whose namespace ends in "late"."""
    return (token * 7 + 3) % 50


class Follow:
    """Late inputs for these requests: each mask depends on the token of the step before.

    Forced are up to four tokens after one that is divisible by 3.
    """

    def concerns(self, request: RequestSpec) -> bool:
        return request.namespace.endswith("late")

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        masks, forced = [], []
        for row in rows:
            last = row.output[-1] if row.output else row.request.tokens[-1]
            masks.append((row.slot, (1 << next_of(last)).to_bytes(7, "little")))
            if last % 3 == 0:
                forced.append((row.slot, tuple(followed([last], 2 + last % 4))))
        return LateInputs(tuple(masks), tuple(forced))


def followed(prompt: Sequence[int], count: int) -> list[int]:
    """The output of such a request."""
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(next_of(tokens[-1]))
    return tokens[1:]


class Driver:
    """Collects all outputs in `outputs[request]`; checks the scheduler's integrity after every call.

    `admitted[step]`: the requests that are admitted in a step, in order.
    """

    def __init__(
        self,
        bounds: Limits,
        pages: Sequence[int] = (64,),
        executor: FakeExecutor | FakeRanks | None = None,
        *,
        page_size: int = 4,
        groups: Sequence[PageGroup] = (),
        snapshots: int | None = None,
    ) -> None:
        """`groups`, or one group of full attention for each element of `pages`. snapshots: as of `Scheduler`."""
        groups = groups or [PageGroup(count, page_size) for count in pages]
        self.late = Follow()
        self.scheduler = Scheduler(bounds, groups, frozenset({END}), self.late.concerns, snapshots)
        self.executor = executor or FakeExecutor(groups, snapshots=snapshots)
        self.outputs: dict[str, list[Output]] = {}
        self.plans: list[Plan] = []
        self.admitted: list[list[str]] = []
        self.in_flight: deque[tuple[Plan, Future[Result]]] = deque()

    def add(self, request: RequestSpec) -> Output | None:
        refused = self.scheduler.add(request)
        self.collect([refused] if refused else [])
        return refused

    def abort(self, requests: list[str] | None) -> list[Output]:
        outputs = self.scheduler.abort(requests)
        self.collect(outputs)
        return outputs

    def submit(self) -> Plan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity(deep=True)
        live = self.scheduler._live.values()
        assert self.scheduler._late_live == sum(self.late.concerns(request.spec) for request in live)
        assert plan or self.in_flight or self.scheduler.idle, "no step can be scheduled although requests are left"
        if plan is not None:
            requests = {request.slot: request.id for request in self.scheduler._in_flight[-1][1]}
            self.plans.append(plan)
            self.admitted.append([requests[start.slot] for start in plan.starts])
            self.in_flight.append((plan, self.executor.submit(plan)))
            if plan.late:
                while len(self.in_flight) > 1:
                    self.apply()
                late = self.late.make(self.scheduler.late_rows(plan))
                self.scheduler.jump(plan, late)
                self.executor.sample(plan.step, late)
        return plan

    def apply(self) -> list[Output]:
        plan, future = self.in_flight.popleft()
        error = future.exception()
        if error is None:
            outputs = self.scheduler.apply(plan, future.result())
        else:
            outputs = self.scheduler.fail(plan, "step_failed", str(error))
        self.scheduler.check_integrity(deep=True)
        self.collect(outputs)
        return outputs

    def collect(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request, []).append(output)

    def run(self, max_steps: int = 3000) -> None:
        """Run until no request is left. With depth 2, a step is planned while the previous one is in flight."""
        for _ in range(max_steps):
            while self.submit() is not None:
                pass
            if not self.in_flight:
                return
            self.apply()
        raise AssertionError(f"requests were still running after {max_steps} steps")

    def tokens(self, request: str) -> list[int]:
        return [token for output in self.outputs.get(request, []) for token in output.tokens]

    def vectors(self, request: str) -> bytes:
        return b"".join(output.vectors or b"" for output in self.outputs.get(request, []))

    def last(self, request: str) -> Output:
        finished = [output for output in self.outputs[request] if output.finish is not None]
        assert len(finished) == 1, f"{request} has {len(finished)} last outputs"
        assert finished[0] is self.outputs[request][-1]
        return finished[0]
