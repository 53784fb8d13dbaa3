"""A loop of the engine's three calls over the fake executor, for the scheduler's tests."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from srv.io.messages import Generate, Output
from srv.sched.plan import Plan, Result
from srv.sched.scheduler import Limits, Scheduler
from srv.testing.fake_executor import FakeExecutor
from srv.types import SamplingParams

END = 49  # the model's end token in these tests; the fake's vocabulary is 0..49


def limits(**changes: object) -> Limits:
    values: dict[str, object] = {
        "max_running_requests": 8,
        "max_queued_requests": None,
        "chunked_prefill_size": 512,
        "max_prefill_tokens": 512,
        "page_size": 4,
        "context_length": 1000,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def message(request: str, prompt: list[int], max_tokens: int = 8, namespace: str = "", **params: object) -> Generate:
    sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})  # type: ignore[arg-type]
    return Generate(request=request, tokens=prompt, params=sampling, namespace=namespace)


class Driver:
    """`outputs[request]` collects what was sent; integrity is checked after every call."""

    def __init__(self, given: Limits, pages: list[int] | None = None, executor: FakeExecutor | None = None) -> None:
        pages = [64] if pages is None else pages
        self.scheduler = Scheduler(given, pages, frozenset({END}))
        self.executor = executor or FakeExecutor(pages, given.page_size)
        self.outputs: dict[str, list[Output]] = {}
        self.plans: list[Plan] = []
        self.flying: deque[tuple[Plan, Future[Result]]] = deque()

    def add(self, sent: Generate) -> Output | None:
        refused = self.scheduler.add(sent)
        self.keep([refused] if refused else [])
        return refused

    def abort(self, requests: list[str] | None) -> list[Output]:
        outputs = self.scheduler.abort(requests)
        self.keep(outputs)
        return outputs

    def submit(self) -> Plan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity(deep=True)
        assert plan or self.flying or self.scheduler.idle, "nothing can be scheduled, and yet requests are left"
        if plan is not None:
            self.plans.append(plan)
            self.flying.append((plan, self.executor.submit(plan)))
        return plan

    def land(self) -> list[Output]:
        plan, future = self.flying.popleft()
        error = future.exception()
        if error is None:
            outputs = self.scheduler.apply(plan, future.result())
        else:
            outputs = self.scheduler.fail(plan, "step_failed", str(error))
        self.scheduler.check_integrity(deep=True)
        self.keep(outputs)
        return outputs

    def keep(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request, []).append(output)

    def run(self, most_steps: int = 3000) -> None:
        """Until nothing is left to do. With depth 2 a step is planned while the one before is in flight."""
        for _ in range(most_steps):
            while self.submit() is not None:
                pass
            if not self.flying:
                return
            self.land()
        raise AssertionError(f"requests were still running after {most_steps} steps")

    def tokens(self, request: str) -> list[int]:
        return [token for output in self.outputs.get(request, []) for token in output.tokens]

    def last(self, request: str) -> Output:
        finished = [output for output in self.outputs[request] if output.finish is not None]
        assert len(finished) == 1, f"{request} has {len(finished)} last outputs"
        assert finished[0] is self.outputs[request][-1]
        return finished[0]
