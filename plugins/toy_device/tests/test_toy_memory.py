"""The memory ledger of an engine on the simulated device, and what is said when its memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch
from test_toy_engine import Small, messages
from test_toy_engine import paged_engine as engine

from srv.commands import ReadMemory
from srv.errors import OutOfMemory
from srv.executor.in_process import InProcessExecutor
from srv.executor.protocol import Allocation, Executor
from srv.executor.spec import EngineSpec
from srv.planning.budget import Budget
from srv.planning.resolution import resolve_launch
from srv.testing.engine import LocalEngine, user_input
from srv.worker.rank import RankWorker
from srv_toy_device.device import Accelerator


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("llama"))


@contextmanager
def occupied(toy: Accelerator, left: int) -> Iterator[None]:
    """Another tensor takes all but `left` bytes of the device."""
    free, _ = toy.mem_get_info()
    block = torch.empty(free - left, dtype=torch.uint8, device="toy")
    try:
        yield
    finally:
        del block


class _TakenExecutor(InProcessExecutor):
    """Memory is taken by others between the measurement and the allocation."""

    toy: Accelerator

    def allocate(self, budget: Budget) -> list[Allocation]:
        with occupied(self.toy, 4096):
            return super().allocate(budget)


class _TakenEngine(LocalEngine):
    """`parameters`: what the facts of the model say, if that is wrong."""

    toy: Accelerator
    parameters: int | None = None

    def spec(self) -> EngineSpec:
        spec = super().spec()
        if self.parameters is None:
            return spec
        return msgspec.structs.replace(spec, model=replace(spec.model, parameters=self.parameters))

    def make_executor(self, spec: EngineSpec) -> Executor:
        self.executor = _TakenExecutor(RankWorker(spec))
        self.executor.toy = self.toy
        return self.executor


def start(toy: Accelerator, small: Small, tokens: int, parameters: int | None = None) -> OutOfMemory:
    """The error of a start whose pool of `tokens` tokens does not fit any more."""
    arguments = ["--device", "toy", "--model-path", str(small.folder), "--dtype", "float32"]
    arguments += ["--max-total-tokens", str(tokens)]

    class Engine(_TakenEngine):
        pass

    Engine.toy, Engine.parameters = toy, parameters
    with pytest.raises(OutOfMemory) as raised:
        Engine(resolve_launch(user_input([*arguments, "--max-running-requests", "8"])))
    return raised.value


def test_lines_are_measured_by_the_allocator_and_the_peak_is_that_of_steps(toy: Accelerator, small: Small) -> None:
    with engine(small) as served:
        lines = {line.name: line for line in served.ready.memory[0]}
        for name in ("weights", "KV pool", *(name for name in lines if name.startswith("captured"))):
            assert lines[name].measured is not None, name
            assert not lines[name].off, lines[name]
        assert lines["runtime"].measured is None
        assert "all processes together" in lines["runtime"].note
        (before,) = served.executor.control(ReadMemory())
        allocated = toy.memory_allocated()
        served.generate(messages(small))
        (after,) = served.executor.control(ReadMemory())
        assert before.peak_bytes == 0
        assert after.peak_bytes == toy.max_memory_allocated() - allocated > 0
        assert after.peak_bytes <= (lines["activations"].predicted or 0) + (lines["workspace"].predicted or 0)
        assert [phase.name for phase in served.ready.phases["engine"]][:3] == ["device", "weights", "prepare"]


def test_a_pool_that_does_not_fit_any_more_is_named_with_the_arguments_that_help(
    toy: Accelerator, small: Small
) -> None:
    error = start(toy, small, 512)
    assert error.line == "KV pool"
    assert "memory ran out for KV pool: the device has no more memory" in str(error)
    assert "--max-total-tokens" in str(error)
    assert "no measured line explains what is lacking" in str(error)


def test_weights_that_are_larger_than_predicted_are_named_when_the_pool_does_not_fit(
    toy: Accelerator, small: Small
) -> None:
    error = start(toy, small, 128, parameters=1000)
    assert error.line == "weights"
    assert "3.91 KiB predicted" in str(error)
    assert "--tp-size" in str(error)


def test_a_step_without_memory_ends_its_requests_with_the_arguments_that_help(toy: Accelerator, small: Small) -> None:
    with engine(small, "--disable-graphs") as served:
        requests = messages(small)
        with occupied(toy, 1024):
            failed = served.generate(requests[:1])
        assert failed[0].error is not None
        code, text = failed[0].error
        assert code == "step_failed"
        assert "memory ran out for activations" in text
        assert "--chunked-prefill-size" in text
        again = served.generate([msgspec.structs.replace(requests[0], id="again")])
        assert again[0].tokens == small.tokens[0], "the engine goes on"
