"""The multi-process executor with scripted ranks: which rank ends the engine, when and why; what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import msgspec
import pytest
import scripted_rank
from every import every

from srv.commands import StopProfile
from srv.engine.build import _budget
from srv.errors import EngineDead, InternalError, RankLost, Refusal, StartError
from srv.executor.multi_process import MultiProcessExecutor, StepFailed
from srv.executor.protocol import RankMemory
from srv.executor.spec import EngineSpec, engine_spec
from srv.memory.groups import PageGroup
from srv.planning.budget import Budget
from srv.planning.resolution import resolve_launch
from srv.sched.plan import Plan, Result
from srv.testing.engine import user_input

HELPERS = Path(scripted_rank.__file__).parent
LIMIT_S = 60.0  # for the end of an engine that has lost a rank: a hang, not the speed of this machine
PLAN = Plan(7, (), (), ())
BUDGET = Budget((PageGroup(5, 16),), 80, ())
SIZES = ((40.0, 80, 30), (39.9, 45, 1))  # free, total, weights


class ScriptedExecutor(MultiProcessExecutor):
    module = "scripted_rank"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    from models_small import small_model

    folder = tmp_path_factory.mktemp("model")
    small_model("llama", vocab_size=100, num_attention_heads=6, num_key_value_heads=2).save_pretrained(folder)
    arguments = [
        "--device",
        "cpu",
        "--model-path",
        str(folder),
        "--tp-size",
        "2",
        "--dist-timeout",
        "1",
        "--mem-fraction-static",
        "0.9",
    ]
    return engine_spec(resolve_launch(user_input(arguments)), "", "")


@contextmanager
def executor(spec: EngineSpec, script: list[str], patch: pytest.MonkeyPatch) -> Iterator[ScriptedExecutor]:
    patch.setenv(scripted_rank.VARIABLE, json.dumps(script))
    patch.setenv("PYTHONPATH", f"{HELPERS}:{os.environ.get('PYTHONPATH', '')}")
    made = ScriptedExecutor(spec)
    try:
        made.start()
        yield made
    finally:
        made.close()


def pids(made: ScriptedExecutor) -> list[int]:
    return [rank.process.pid for rank in made._ranks]


def test_a_step_is_answered_by_all_ranks(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements come in the order of ranks; the smallest sizes the pool; steps in flight are answered in order."""
    with executor(spec, ["answer", "late"], monkeypatch) as made:
        memory = made.measure()
        assert [(rank.free, rank.weight_bytes) for rank in memory] == [(1000, 10), (999, 11)]
        assert [each.pool_bytes for each in made.allocate(BUDGET)] == [5, 5]
        made.check()
        assert [answer.files for answer in made.control(StopProfile())] == [["file of 0"], ["file of 1"]]
        futures = [made.submit(Plan(step, (), (), ())) for step in (1, 2)]
        assert [future.result() for future in futures] == [Result(1, ()), Result(2, ())]
        processes, directory = pids(made), made._directory.path
        assert directory.is_dir()
    assert not directory.exists()
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@every(
    ("script", "error", "reason"),
    [
        (["answer", "diverge"], RankLost, r"rank 1 \(process \d+\) returned another result than rank 0 for step 7"),
        (["answer", "break"], RankLost, r"rank 1 \(process \d+\) failed: KeyError: scripted"),
        (["answer", "exit"], RankLost, r"rank 1 \(process \d+\) ended with status 3"),
        (["exit", "lose"], RankLost, r"rank 0 \(process \d+\) ended with status 3"),
        (["lose", "silent"], RankLost, r"rank 1 \(process \d+\) does not answer"),
        (["silent", "answer"], RankLost, r"rank 0 \(process \d+\) does not answer"),
        (["lose", "fail"], RankLost, r"rank 1 \(process \d+\) failed on step 7: ValueError: scripted"),
        (["silent", "fail"], RankLost, r"rank 1 \(process \d+\) failed on step 7: ValueError: scripted"),
        (["answer", "fail"], RankLost, r"rank 1 \(process \d+\) failed on step 7: ValueError: scripted"),
        (["lose", "lose"], RankLost, r"rank 0 \(process \d+\) failed on step 7"),
        (["fail", "fail"], StepFailed, "ValueError: scripted"),
    ],
)
def test_faults_of_a_step(
    script: list[str], error: type[InternalError], reason: str, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor(spec, script, monkeypatch) as made:
        made.allocate(BUDGET)
        started = time.monotonic()
        with pytest.raises(error, match=reason):
            made.submit(PLAN).result()
        assert time.monotonic() - started < LIMIT_S


def test_the_rank_with_the_fewest_pages_sizes_the_pool(spec: EngineSpec) -> None:
    """That need not be the one with the least free memory: the share of the pool depends on its weights, too."""
    config, without_reserve = spec.config, msgspec.structs.replace(spec, reserved_parts={})
    busy, small = (RankMemory("host", int(free * 2**18), total << 18, own << 18) for free, total, own in SIZES)
    assert small.free < busy.free
    pages = {order: _budget(without_reserve, config, order).pages for order in ((small, busy), (small,), (busy,))}
    assert pages[small, busy] == pages[(busy,)] < pages[(small,)]
    full = RankMemory("host", 0, 80 << 18, 0)
    with pytest.raises(Refusal, match="cannot hold one request"):
        _budget(without_reserve, config, (small, busy, full))


def check_until(made: ScriptedExecutor, end: float) -> None:
    while time.monotonic() < end:
        made.check()


def test_an_idle_rank_that_ends_or_is_stopped_is_noticed(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, reason in ((signal.SIGKILL, "ended with signal 9"), (signal.SIGSTOP, "is stopped")):
        with executor(spec, ["answer", "answer"], monkeypatch) as made:
            made.allocate(BUDGET)
            made.check()
            os.kill(pids(made)[1], number)
            started = time.monotonic()
            with pytest.raises(RankLost, match=rf"rank 1 \(process \d+\) {reason}"):
                check_until(made, started + LIMIT_S)


def test_stopped_ranks_end_the_engine_while_it_waits_for_all_of_them(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may compute as long as they like; stopped ones compute nothing. A rank that goes on in time is not lost."""
    with executor(spec, ["late", "late"], monkeypatch) as made:
        made.allocate(BUDGET)
        future = made.submit(PLAN)
        for pid in pids(made):
            os.kill(pid, signal.SIGSTOP)
        Timer(0.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids(made)]).start()
        assert future.result() == Result(7, ())
        for wait in (made.submit(PLAN).result, lambda: made.control(StopProfile())):
            for pid in pids(made):
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(RankLost, match=r"^rank \d \(process \d+\) is stopped$"):
                wait()
            assert time.monotonic() - started < LIMIT_S


def test_the_engine_ends_while_it_waits_if_its_parent_has_exited(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor(spec, ["silent", "silent"], monkeypatch) as made:
        made.allocate(BUDGET)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        with pytest.raises(EngineDead, match="the API process has exited"):
            made.submit(PLAN).result()


def start(spec: EngineSpec, script: list[str], patch: pytest.MonkeyPatch) -> None:
    with executor(spec, script, patch) as made:
        made.measure()
        made.allocate(BUDGET)


@every("phase", ["load", "measure", "allocate"])
def test_the_rank_that_prevents_the_start_is_named(
    phase: str, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot reach rank 1, and says so first; rank 1 ends without a message, or with its own."""
    faults = {"exit": (r"the engine could not start: rank 1 \(process \d+\) ended with status 3", 1)}
    faults["refuse"] = (f"rank 1: {phase} refuse", 2)
    for fault, (line, status) in faults.items():
        script = [f"{phase} lose", f"{phase} {fault}"]
        with pytest.raises(StartError, match=f"^{line}$") as raised:
            start(spec, script, monkeypatch)
        assert raised.value.status == status
