"""Run an engine's steps one at a time on the caller's thread, so that a whole step can be counted or timed.

A step is one iteration of the engine's loop without overlap: schedule, launch, collect, apply.
"""

from __future__ import annotations

from collections.abc import Sequence

from srv.sched.plan import Result
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams


def request_of(
    number: int, tokens: Sequence[int], output: int, temperature: float = 0.0, top_p: float = 1.0
) -> RequestSpec:
    """A request that ends only by its length; greedy unless it has a temperature."""
    params = SamplingParams(max_tokens=output, temperature=temperature, top_p=top_p, seed=number, ignore_eos=True)
    return RequestSpec(id=f"request {number}", tokens=tuple(tokens), params=params)


class Stepping:
    """Drives the scheduler and the runner of an engine whose own loop is idle."""

    def __init__(self, engine: LocalEngine) -> None:
        self._scheduler = engine._engine.scheduler
        self.runner = engine._engine.executor.worker.runner

    def add(self, prompts: Sequence[Sequence[int]], output: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        """Queue requests of `output` tokens each."""
        for number, tokens in enumerate(prompts):
            refused = self._scheduler.add(request_of(number, tokens, output, temperature, top_p))
            assert refused is None, refused

    def step(self) -> Result:
        """Run one step; there must be a request to run."""
        plan = self._scheduler.schedule()
        assert plan is not None, "nothing is left to run"
        launched = self.runner.launch(plan)
        assert launched is not None, "a step waits for late inputs"
        result: Result = launched.collect()
        self._scheduler.apply(plan, result)
        return result

    def until_all_decode(self, rows: int) -> None:
        """Run steps until all prompts are computed and one step with `rows` decode rows has been replayed."""
        result = self.step()
        while not (result.way == "graph" and len(result.rows) == rows):
            result = self.step()

    def end(self, flush: bool = True) -> None:
        """Abort all requests. `flush`: also clear the prefix cache."""
        self._scheduler.abort(None)
        assert not flush or self._scheduler.flush()
