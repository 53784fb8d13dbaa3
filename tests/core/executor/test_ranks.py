"""Real ranks in processes of their own: the same tokens as one rank, a share of the memory each, and losses by name."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_support import gone, wait_until
from engine_small import Small, engine, make_small, message, messages, prompted
from every import every
from fp8_weights import FORMS, write_fp8
from model_cells import minimax_m2
from models_small import small_model
from small_configurations import configurations, for_two_ranks
from stored_orders import made as stored_model
from stored_orders import stored_form, write_stored

from srv.commands import Answer, StartProfile, StopProfile
from srv.dist.group import RankGroup
from srv.errors import RankLost, Refusal
from srv.executor.multi_process import MultiProcessExecutor
from srv.executor.rank_messages import RankSpec
from srv.executor.spec import encode, engine_spec
from srv.io.channel import SocketDirectory
from srv.models.locate import demo_model
from srv.planning.resolution import resolve_launch
from srv.planning.states import bytes_per_slot
from srv.sched.late import LateInputMaker, LateInputs, LateRow
from srv.testing.engine import CheckedEngine, LocalEngine, user_input
from srv.types import Pooling, PoolingParams, RequestSpec, SamplingParams
from srv_matrix.pytest_plugin import covers

PARTS = 20  # of all classes: slices of the proof take about equally long
LIMIT_S = 60.0  # for the end of an engine that has lost a rank: a hang, not the speed of this machine
# Eight heads and two KV heads: with four ranks, each KV head is on two of them.
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"), **SIZES)


def ranks_of(made: LocalEngine) -> MultiProcessExecutor:
    assert isinstance(made.executor, MultiProcessExecutor)
    return made.executor


def held(made: LocalEngine) -> list[str]:
    return [text for name, text in made.ready.budget if name.startswith("rank_")]


@covers("tp_size=1", "tp_size=2", "dp_size=1", platform="cpu")
def test_tp_size_divides_weights_and_pool(llama: Small, tmp_path: Path) -> None:
    """Equal tokens, greedy and sampled; each rank holds half of the matrices and of the pool's heads, not a copy."""
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    with engine(llama, page=16, pool=256) as one:
        expected = [each.tokens for each in one.generate(messages(llama.prompts, **sampled))]
        whole_weights = one.executor.measure()[0].weight_bytes
        pages = one.ready.pages
    with engine(llama, page=16, pool=256, tp_size=2) as two:
        assert [each.tokens for each in two.generate(messages(llama.prompts))] == llama.tokens
        assert [each.tokens for each in two.generate(messages(llama.prompts, **sampled))] == expected
        memory = ranks_of(two).measure()
        assert_each_rank_writes_a_profile(two, llama, tmp_path)
        assert two.ready.pages == pages
        assert len(held(two)) == 2
        directory, processes = ranks_of(two)._directory.path, [rank.process for rank in ranks_of(two)._ranks]
    norms = 4 * 64 * (2 * 3 + 1)
    assert [rank.weight_bytes for rank in memory] == [(whole_weights - norms) // 2 + norms] * 2
    pool_bytes = (
        3 * (pages[0] + 1) * 16 * 1 * (8 + 8) * 4
    )  # layers, tokens, one of two KV heads, key and value, float32
    assert all(f"a KV pool of {pool_bytes / 1024:.2f} KiB" in text for text in held(two))
    assert not directory.exists()
    assert all(process.returncode is not None for process in processes)


def test_ranks_calculate_the_same_scales_of_keys_and_values(llama: Small) -> None:
    """Each has one of two KV heads, and scales of both."""
    flags = {"page": 16, "pool": 256, "kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True}
    with engine(llama, **flags) as one, engine(llama, tp_size=2, **flags) as two:
        found = [[each.tokens for each in made.generate(messages(llama.prompts))] for made in (one, two)]
    assert found[0] == found[1]


def assert_each_rank_writes_a_profile(made: LocalEngine, model: Small, folder: Path) -> None:
    """Of the steps between the two commands, with the collective operations."""
    executor = ranks_of(made)
    assert executor.control(StartProfile(str(folder))) == [Answer(), Answer()]
    made.generate(messages(model.prompts))
    files = [file for answer in executor.control(StopProfile()) for file in answer.files]
    assert len(files) == 2
    for file in files:
        with gzip.open(file) as trace:
            names = {each.get("name", "") for each in json.load(trace)["traceEvents"]}
        assert any("all_reduce" in name for name in names)


class Counting(CheckedEngine):
    """The only token that may follow another one is the next higher, in requests of the namespace "count"."""

    def late_inputs(self) -> LateInputMaker:
        return self

    def concerns(self, request: RequestSpec) -> bool:
        return request.namespace == "count"

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        last = [(row.slot, [*row.request.tokens, *row.output][-1]) for row in rows]
        return LateInputs(tuple((slot, (1 << (token + 1)).to_bytes(13, "little")) for slot, token in last))


def test_ranks_sample_alike_with_drafts_and_late_inputs(llama: Small) -> None:
    """Each rank has a drafter and histories of its own, and gets the same masks; their digests agree.

    Also those of log-probabilities and hidden states, which each rank computes.
    """
    counted = message("counted", [3, 5], 10, namespace="count")
    reported = message("reported", llama.prompts[-1], logprobs=2, prompt_logprobs=2, hidden_states=True)
    with engine(llama, page=16, pool=1024, tp_size=2, kind=Counting, speculative_algorithm="NGRAM") as made:
        results = made.generate([*messages(llama.prompts), counted, reported])
        assert made.stats().drafts_proposed > 0
    assert [each.tokens for each in results] == [*llama.tokens, list(range(6, 16)), llama.tokens[-1]]
    assert results[-1].logprobs
    assert results[-1].prompt_logprobs
    assert results[-1].vectors


@pytest.mark.slow
@every(("form", "ranks"), [("int8wo", 2), ("fp8wo", 4), ("fp8, blocks", 2)])
def test_greedy_tokens_of_quantized_weights(form: str, ranks: int, tmp_path: Path) -> None:
    """Those of one rank, whose weights the ranks divide. (Kernels for packed integers may round inputs to 8 bits.)"""
    sizes = {**SIZES, "intermediate_size": 128, "head_dim": 32}
    small, folder, options = make_small("llama", tmp_path / form, **sizes), tmp_path / f"{form} stored", {}
    if form.endswith("wo"):
        options["torchao_config"] = form
    else:
        write_stored(folder, small_model("llama", **sizes), stored_form(form))
        small = replace(small, folder=folder)
    found = []
    for count in (1, ranks):
        with engine(small, page=16, tp_size=count, **options) as made:
            results = made.generate(messages(small.prompts))
            found.append(([each.tokens for each in results], made.executor.measure()[0].weight_bytes))
    (tokens, whole), (of_ranks, part) = found
    assert of_ranks == tokens
    assert part < whole * 0.75


@pytest.mark.slow
@every(("kind", "ranks"), [("llama", 4), ("qwen3", 2), ("qwen3", 4)])
def test_greedy_tokens_of_random_models(kind: str, ranks: int, tmp_path: Path) -> None:
    small = make_small(kind, tmp_path, **SIZES)
    with engine(small, page=16, tp_size=ranks) as made:
        assert [each.tokens for each in made.generate(messages(small.prompts))] == small.tokens


HYBRID: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 4, "num_experts_per_tok": 2}
DELTA |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 16}


@pytest.mark.slow
@every(
    ("kind", "ranks", "fields"),
    [
        ("qwen3_next", 4, DELTA),
        ("granitemoehybrid", 2, {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 1}),
        ("jamba", 2, {"num_experts": 4, "mamba_dt_rank": 4}),
    ],
)
def test_ranks_divide_recurrent_states(kind: str, ranks: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """Prompts are continued from states of cached prefixes, too. A slot has the states of a rank's heads alone."""
    small = make_small(kind, tmp_path, **HYBRID, **fields)
    longer = [message("longer", [*small.prompts[-1], *small.tokens[-1][:6]])]
    found = []
    for count in (1, ranks):
        with engine(small, page=4, tp_size=count, max_mamba_cache_size=32) as made:
            assert [each.tokens for each in made.generate(messages(small.prompts))] == small.tokens
            (again,) = made.generate(longer)
            assert again.cached_tokens > 0
            assert made.context.kernels.differences(made.ready.kernels) == {}
            found.append((again.tokens, made.executor.measure()[0].weight_bytes, slot_bytes(made)))
    (tokens, whole, slot), (of_ranks, part, own) = found
    assert of_ranks == tokens
    assert part < whole * 0.75
    copied = kind == "granitemoehybrid"  # one group of b and c
    assert slot < own * ranks if copied else slot == own * ranks


def slot_bytes(made: LocalEngine) -> int:
    return bytes_per_slot(made.context.resolved.config, made.context.model)


@pytest.mark.slow
@every(
    ("kind", "form"),
    [("v3", "fp8, blocks"), ("phi3", "compressed-tensors, channel")],
)
def test_greedy_tokens_of_weights_in_another_order(kind: str, form: str, tmp_path: Path) -> None:
    """Experts in blocks, fused projections, and queries whose rotary rows change places. (Kernels for packed integers
    round inputs to 8 bits, those of each rank by themselves.)
    """
    fields = {"vocab_size": 100, "intermediate_size": 128, "hidden_size": 128}
    own = {"moe_intermediate_size": 128} if kind == "v3" else {}
    model = write_stored(tmp_path, stored_model(kind, **fields, **own), stored_form(form))
    small, found = prompted(model, tmp_path), []
    for ranks in (1, 2):
        with engine(small, page=16, tp_size=ranks) as made:
            results = made.generate(messages(small.prompts))
            found.append(([each.tokens for each in results], made.executor.measure()[0].weight_bytes))
            assert made.context.kernels.differences(made.ready.kernels) == {}
    (tokens, whole), (of_ranks, part) = found
    assert of_ranks == tokens
    assert part < whole * 0.75


@pytest.mark.proof(minutes=0.6)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_on_two_ranks(part: int, tmp_path: Path) -> None:
    """Greedy tokens of random weights, or vectors, are those of one rank."""
    for name in list(configurations())[part::PARTS]:
        (folder := tmp_path / name).mkdir()
        compare_two_ranks(name, folder)


def compare_two_ranks(name: str, tmp_path: Path) -> None:
    fields = {**for_two_ranks(configurations()[name]), "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    prompts = [tuple(range(5 + number, 12 + number * 9)) for number in range(4)]
    found, memory = [], []
    for ranks in (1, 2):
        flags = [*flags_of_random(tmp_path), "--tp-size", str(ranks)]
        with CheckedEngine.launch(flags) as made:
            params: Any = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            if not made.context.model.generates:
                params = PoolingParams(pooling=Pooling.LAST)
            requests = [RequestSpec(id=str(i), tokens=each, params=params) for i, each in enumerate(prompts)]
            results = made.generate(requests)
            found.append([(each.error, each.tokens, each.vectors) for each in results])
            memory.append(made.executor.measure()[0].weight_bytes)
            assert made.context.kernels.differences(made.ready.kernels) == {}
    for (fault, tokens, vectors), (other, of_ranks, parts) in zip(*found, strict=True):
        assert (name, fault, other, of_ranks) == (name, None, None, tokens)
        if vectors:
            np.testing.assert_allclose(
                np.frombuffer(parts, dtype="<f4"), np.frombuffer(vectors, dtype="<f4"), atol=1e-4, rtol=1e-3
            )
    assert memory[1] < memory[0] * 0.75


def flags_of_random(folder: Path) -> list[str]:
    options = ["--device", "cpu", "--model-path", str(folder), "--dtype", "float32", "--load-format", "dummy"]
    limits = ["--context-length", "64", "--max-running-requests", "4", "--disable-graphs"]
    return [*options, *limits, "--random-seed", "3"]


@pytest.mark.slow
@covers("ep_size=1", "ep_size=2", platform="cpu")
def test_ep_size_distributes_experts(tmp_path: Path) -> None:
    """Equal tokens; each rank holds half of the experts, or halves of those. Kernels are those that are planned."""
    fields = {**SIZES, "intermediate_size": 64, "head_dim": 32}
    small = prompted(write_fp8(tmp_path, FORMS["fp8, blocks"], made=minimax_m2(**fields)), tmp_path)
    held = {}
    for ranks, parts in ((2, 1), (2, 2), (4, 2)):
        with engine(small, page=16, tp_size=ranks, ep_size=parts) as made:
            assert [result.tokens for result in made.generate(messages(small.prompts))] == small.tokens
            assert made.context.kernels.differences(made.ready.kernels) == {}
            held[ranks, parts] = [rank.weight_bytes for rank in ranks_of(made).measure()]
    assert held[2, 2] == held[2, 1]
    assert len({*held[4, 2]}) == 1
    assert held[4, 2][0] < 0.7 * held[2, 2][0]


@pytest.mark.slow
def test_minimax_m2_in_fp8_blocks(tmp_path: Path) -> None:
    """Ranks add up the squares of norms over all heads, in steps that are replayed as well, and run what is planned."""
    fields = {**SIZES, "intermediate_size": 64, "head_dim": 32}
    small = prompted(write_fp8(tmp_path, FORMS["fp8, blocks"], made=minimax_m2(**fields)), tmp_path)
    for ranks in (1, 2):
        with engine(small, page=16, tp_size=ranks) as made:
            assert [each.tokens for each in made.generate(messages(small.prompts))] == small.tokens
            assert made.stats().replayed_steps > 0
            assert made.context.kernels.differences(made.ready.kernels) == {}
            assert any("joint_rms_norm" in key for key in made.ready.kernels) is (ranks == 2)


@pytest.mark.slow
@every("arguments", [[], ["--dequantize-weights"], ["--load-format", "dummy"]])
def test_the_demo_model_on_three_ranks(arguments: list[str]) -> None:
    """Nine heads and three KV heads, in the file's blocks and dequantized; steps are replayed from graphs."""
    prompts = [tuple(range(100 + number, 140 + number * 3)) for number in range(3)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    found = []
    for ranks in (1, 3):
        flags = ["--device", "cpu", "--model-path", str(demo_model()), "--dtype", "float32", "--tp-size", str(ranks)]
        pool = ["--max-total-tokens", "1024", "--max-running-requests", "4"]
        with CheckedEngine.launch([*flags, *pool, *arguments]) as made:
            requests = [RequestSpec(id=str(i), tokens=prompt, params=params) for i, prompt in enumerate(prompts)]
            found.append([each.tokens for each in made.generate(requests)])
            stats = made.stats()
            assert stats.replayed_steps > stats.eager_steps
    assert found[0] == found[1]


@every(
    ("flags", "reason"),
    [
        ({"tp_size": 3}, "its 8 attention heads are not a multiple of 3"),
        ({"tp_size": 3}, r"\(this model allows 1, 2, 4\)"),
        ({"tp_size": 2, "model_impl": "transformers"}, "only native ones"),
    ],
)
def test_refusals(flags: dict[str, object], reason: str, llama: Small) -> None:
    with pytest.raises(Refusal, match=reason), engine(llama, page=16, **flags):
        pass


def until_lost(made: LocalEngine, number: int, prompts: list[list[int]]) -> tuple[str, float]:
    """Send a signal to rank 1 while requests run: the message of the loss, and the seconds until then."""
    for each in messages(prompts, count=150):
        made.send(each)
    for _ in range(4):
        made.step()
    os.kill(ranks_of(made)._ranks[1].process.pid, number)
    started = time.monotonic()
    try:
        made.run([f"request {index}" for index in range(len(prompts))])
    except RankLost as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the requests ended although a rank is lost")


def test_a_killed_rank_ends_the_engine(llama: Small) -> None:
    with LocalEngine.launch(flags_of(llama)) as made:
        text, seconds = until_lost(made, signal.SIGKILL, llama.prompts)
        pid = ranks_of(made)._ranks[1].process.pid
    assert text == f"rank 1 (process {pid}) ended with signal 9"
    assert seconds < LIMIT_S


@pytest.mark.slow
@covers("dist_timeout=1", "dist_timeout=3", platform="cpu")
def test_dist_timeout(llama: Small) -> None:
    """A stopped rank ends the engine once the others have waited for it that long."""
    waited = []
    for timeout in (1, 3):
        with LocalEngine.launch(flags_of(llama, "--dist-timeout", str(timeout))) as made:
            text, seconds = until_lost(made, signal.SIGSTOP, llama.prompts)
            pid = ranks_of(made)._ranks[1].process.pid
        assert text == f"rank 1 (process {pid}) is stopped"
        assert timeout <= seconds < LIMIT_S
        waited.append(seconds)
    assert waited[0] < waited[1]


ORPHAN = """
import json, os, subprocess, sys, time
spec = json.loads(sys.argv[1])
rank = subprocess.Popen([sys.executable, "-m", "srv.worker.process"], stdin=subprocess.PIPE)
rank.stdin.write(json.dumps({**spec, "parent": os.getpid()}).encode())
rank.stdin.close()
print(rank.pid)
time.sleep(float(sys.argv[2]))
"""


def test_a_rank_whose_engine_ends_while_it_waits_for_the_others_ends_too(llama: Small) -> None:
    """The other rank never joins, and the engine process is gone after three seconds."""
    directory = SocketDirectory()
    spec = RankSpec(
        engine=engine_spec(resolve_launch(user_input(flags_of(llama))), "", ""),
        group=RankGroup(size=2, directory=str(directory.path), timeout_s=600, start_timeout_s=600),
        number=0,
        to_rank=directory.address("to_rank_0"),
        from_ranks=directory.address("from_ranks"),
        parent=0,
    )
    arguments = [sys.executable, "-c", ORPHAN, encode(spec).decode(), "3"]
    pid = int(subprocess.run(arguments, capture_output=True, check=True, timeout=60).stdout)
    wait_until(lambda: gone(pid) and not directory.path.exists(), 30, "the rank and its directory are gone")
    directory.close()


def flags_of(small: Small, *more: str) -> list[str]:
    options = ["--device", "cpu", "--model-path", str(small.folder), "--dtype", "float32", "--page-size", "16"]
    return [*options, "--max-total-tokens", "4096", "--tp-size", "2", *more]
