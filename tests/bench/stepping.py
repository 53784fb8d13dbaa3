"""An engine's steps one at a time on the caller's thread, so that all of one can be counted or timed.

A step is what the engine's loop does with one plan: schedule, launch, collect, apply. Nothing overlaps here.
"""

from __future__ import annotations

from collections.abc import Sequence

from srv.io.messages import Generate
from srv.sched.plan import Result
from srv.testing.engine import LocalEngine
from srv.types import SamplingParams


def request_of(
    number: int, tokens: Sequence[int], output: int, temperature: float = 0.0, top_p: float = 1.0
) -> Generate:
    """A request that only its length ends; greedy, unless it has a temperature."""
    params = SamplingParams(max_tokens=output, temperature=temperature, top_p=top_p, seed=number, ignore_eos=True)
    return Generate(request=f"request {number}", tokens=list(tokens), params=params)


class Stepping:
    """Drives the scheduler and the runner of an engine whose own loop rests meanwhile."""

    def __init__(self, engine: LocalEngine) -> None:
        self._scheduler = engine._engine.scheduler
        self.runner = engine._engine.executor._runner

    def add(self, prompts: Sequence[Sequence[int]], output: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        """Queue requests of `output` tokens each."""
        for number, tokens in enumerate(prompts):
            refused = self._scheduler.add(request_of(number, tokens, output, temperature, top_p))
            assert refused is None, refused

    def step(self) -> Result:
        """One step; there must be something to run."""
        plan = self._scheduler.schedule()
        assert plan is not None, "nothing is left to run"
        result: Result = self.runner.launch(plan).collect()
        self._scheduler.apply(plan, result)
        return result

    def until_all_decode(self, rows: int) -> None:
        """Prompts are computed, and one step was replayed in which `rows` rows decode."""
        result = self.step()
        while not (result.replayed and len(result.rows) == rows):
            result = self.step()

    def end(self, flush: bool = True) -> None:
        """Requests end here; `flush`: what the prefix cache has of them is forgotten too."""
        self._scheduler.abort(None)
        assert not flush or self._scheduler.flush()
