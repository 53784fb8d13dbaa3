"""Several fake ranks behind one executor: each gets its own copy of every message, and all have to agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from srv.executor.rank_messages import RunStep, SampleStep, Stepped, digest
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result
from srv.testing.fake_executor import FakeExecutor


class FakeRanks:
    """What `MultiProcessExecutor` does with plans and results, without processes. `ranks` share no state."""

    def __init__(self, make: Callable[[], FakeExecutor], ranks: int) -> None:
        self._ranks = [make() for _ in range(ranks)]
        self._waiting: tuple[Sequence[Future[Result]], Future[Result]] | None = None

    def submit(self, plan: Plan) -> Future[Result]:
        message = msgspec.msgpack.encode(RunStep(plan))
        futures = [rank.submit(msgspec.msgpack.decode(message, type=RunStep).plan) for rank in self._ranks]
        agreed: Future[Result] = Future()
        if plan.late and not futures[0].done():
            self._waiting = futures, agreed
        else:
            _agree(futures, agreed)
        return agreed

    def sample(self, step: int, late: LateInputs) -> None:
        message = msgspec.msgpack.encode(SampleStep(step, late))
        for rank in self._ranks:
            received = msgspec.msgpack.decode(message, type=SampleStep)
            rank.sample(received.step, received.late)
        if self._waiting is not None:
            _agree(*self._waiting)
            self._waiting = None


def _agree(futures: Sequence[Future[Result]], agreed: Future[Result]) -> None:
    """Give the result of the first rank, which has to be that of all, or the error that all have raised."""
    errors = [future.exception() for future in futures]
    assert len({str(error) for error in errors}) == 1, errors
    if errors[0] is not None:
        agreed.set_exception(errors[0])
        return
    results = [future.result() for future in futures]
    assert len({digest(result) for result in results}) == 1, results
    answer = msgspec.msgpack.encode(Stepped(0, results[0].step, digest(results[0]), results[0]))
    received = msgspec.msgpack.decode(answer, type=Stepped).result
    assert received is not None
    agreed.set_result(received)
