"""Several replicas of an engine, each a process with ranks of its own, serve as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_small import Small, make_small, saved_small
from every import every
from model_cells import random_model

from srv import LLM
from srv.commands import Answer, StartProfile, StopProfile
from srv.engine.replicas import EngineReplicas, sum_of
from srv.errors import EngineDead, StartError
from srv.io.messages import Stats
from srv_matrix.pytest_plugin import covers

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "page_size": 16,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
}
SIZES = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def stats(**values: Any) -> Stats:
    numbers = dict.fromkeys(Stats.__struct_fields__[: Stats.__struct_fields__.index("state_slots_total")], 1)
    return Stats(**{**numbers, "call": 7, **values})


def test_statistics_of_all_replicas() -> None:
    """Counts are sums; what stands for a state holds where it holds for all."""
    first = stats(running=3, step_tokens=[1, 2], slow_steps={"not_compiled_for": 2}, paused=True, inert={"a": "x"})
    second = stats(
        running=4, step_tokens=[1], slow_steps={"not_compiled_for": 1}, inert={}, hooks_switched_off={"h": "y"}
    )
    both = sum_of([first, second])
    assert (both.call, both.running, both.steps, both.step_tokens) == (7, 7, 2, [2, 2])
    assert (both.slow_steps, both.paused, both.inert) == ({"not_compiled_for": 3}, False, {})
    assert both.hooks_switched_off == {"h": "y"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Small:
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return saved_small(random_model("qwen3_moe", **sizes), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def llm(small: Small) -> Iterator[LLM]:
    with LLM(small.folder, dp_size=2, tp_size=2, load_balance_method="round_robin", **ARGUMENTS) as llm:
        yield llm


@pytest.mark.slow
@covers("dp_size=2", "load_balance_method=round_robin", "enable_dp_attention=false", platform="cpu")
def test_replicas_share_the_requests(llm: LLM, small: Small) -> None:
    """The tokens of one replica, and both have computed some; pages and statistics are those of both."""
    outputs = llm.generate([list(prompt) for prompt in small.prompts], max_tokens=len(small.tokens[0]), **GREEDY)
    assert [output.outputs[0].tokens for output in outputs] == small.tokens
    total = llm._run(llm._client.stats())
    assert (total.running, total.finished) == (0, len(small.prompts))
    assert total.pages_total == 2 * 1024 // 16
    assert total.steps > 0
    assert isinstance(llm._engine, EngineReplicas)
    assert sorted(load.requests for load in llm._engine._balance._loads) == [0, 0]


@pytest.mark.slow
def test_calls_reach_all_replicas(llm: LLM, small: Small, tmp_path: Path) -> None:
    """Each rank of each replica answers, and writes files of its own."""
    assert llm._run(llm._client.control(StartProfile(str(tmp_path)))) == [Answer()] * 4
    answers = llm._run(llm._client.control(StopProfile()))
    assert len({file for answer in answers for file in answer.files}) == len(list(tmp_path.iterdir())) == 4
    assert llm._run(llm._client.flush()).done
    assert llm._run(llm._client.stats()).pages_cached == 0
    assert llm._run(llm._client.pause(paused=True))
    assert llm._run(llm._client.stats()).paused
    assert not llm._run(llm._client.pause(paused=False))

    prompt = list(small.prompts[0])
    assert llm.generate([prompt] * 3, max_tokens=3, **GREEDY)[2].outputs[0].tokens == small.tokens[0][:3]


def generate_often(llm: LLM) -> None:
    """A replica may finish some requests before the loss of another one is noticed."""
    for _ in range(100):
        llm.generate([[5, 6, 7]], max_tokens=250, **GREEDY)


@pytest.mark.slow
def test_a_lost_replica_ends_all_and_nothing_is_left(small: Small) -> None:
    llm = LLM(small.folder, dp_size=2, **ARGUMENTS)
    try:
        assert isinstance(llm._engine, EngineReplicas)
        processes = [replica._process for replica in llm._engine._replicas]
        directories = [replica._directory.path for replica in llm._engine._replicas]
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="replica 1: the engine process ended with signal 9"):
            generate_often(llm)
    finally:
        llm.close()
    assert all(process.poll() is not None for process in processes)
    assert not any(directory.exists() for directory in directories)


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_named(small: Small) -> None:
    with pytest.raises(StartError, match=r"replica \d: .*KV pool"):
        LLM(small.folder, dp_size=2, **{**ARGUMENTS, "max_total_tokens": None, "mem_fraction_static": 1e-6})


@pytest.mark.slow
@covers("enable_dp_attention=true", "enable_dp_lm_head=false", "enable_dp_lm_head=true", platform="cpu")
@every(
    ("replicas", "flags"),
    [
        (2, {"tp_size": 2}),
        (2, {"tp_size": 4, "enable_dp_lm_head": True, "disable_overlap_schedule": True, "chunked_prefill_size": 64}),
        (2, {"tp_size": 2, "ep_size": 2, "disable_graphs": True, "chunked_prefill_size": 32}),
    ],
)
def test_replicas_that_compute_each_step_together(replicas: int, flags: dict[str, Any], mixture: Small) -> None:
    """Equal tokens, with requests on one replica alone and on all; limits are those of all replicas together."""
    both = {**ARGUMENTS, "max_running_requests": 8, "dp_size": replicas, "enable_dp_attention": True, **flags}
    with LLM(mixture.folder, load_balance_method="round_robin", **both) as llm:
        length = len(mixture.tokens[0])
        outputs = llm.generate([list(prompt) for prompt in mixture.prompts], max_tokens=length, **GREEDY)
        assert [output.outputs[0].tokens for output in outputs] == mixture.tokens
        for prompt, tokens in zip(mixture.prompts, mixture.tokens, strict=True):
            (alone,) = llm.generate([list(prompt)], max_tokens=length, **GREEDY)
            assert alone.outputs[0].tokens == tokens
        total = llm._run(llm._client.stats())
        assert total.finished == 2 * len(mixture.prompts)
        assert (total.replayed_steps > 0) is ("disable_graphs" not in flags)
        assert llm._run(llm._client.flush()).done
        assert isinstance(llm._engine, EngineReplicas)
        meeting = llm._engine._meeting
        assert meeting is not None
    assert not meeting.path.exists()
