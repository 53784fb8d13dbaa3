"""Arguments of experts have an effect: which backend computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_small import Small, engine, make_small, messages
from platform_plugins import write_plugin

from srv.commands import (
    Answer,
    ExpertLoad,
    ExpertUsage,
    ReadExpertCounts,
    ReadExpertLoad,
    StartExpertCounts,
    StopExpertCounts,
)
from srv.errors import Refusal
from srv.testing.engine import CheckedEngine
from srv_cpu.facts import FACTS
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

BACKENDS = [spec.name for spec in FACTS.backends["moe"]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def refusal(folder: Path, small: Small, **flags: object) -> tuple[str, str]:
    with pytest.raises(Refusal) as refused, engine(small, model_path=folder, **flags):
        pass
    return refused.value.rejections[0].code, refused.value.rejections[0].reason


@covers(*(f"moe_runner_backend={name}" for name in BACKENDS), platform="cpu")
def test_moe_runner_backend(mixture: Small, tmp_path: Path) -> None:
    """The backend that is named computes the experts; captured steps are refused if it cannot run in them."""
    for name in BACKENDS:
        with engine(mixture, moe_runner_backend=name) as served:
            actual = [result.tokens for result in served.generate(messages(mixture.prompts))]
            running = {name for key, name in served.ready.kernels.items() if key.startswith("experts ")}
        assert (actual, running) == (mixture.tokens, {name})
    assert refusal(mixture.folder, mixture, moe_runner_backend="torch_nativ")[0] == "unknown_backend"
    code, reason = refusal(mixture.folder, mixture, moe_runner_backend="torch_native", graph_batch_sizes="1")
    assert (code, "moe backend torch_native" in reason) == ("excluded", True), reason
    dense = make_small("llama", tmp_path / "dense", num_hidden_layers=1)
    assert refusal(dense.folder, dense, moe_runner_backend=BACKENDS[0])[0] == "inert"
    code, reason = refusal(mixture.folder, mixture, moe_runner_backend=BACKENDS[0], model_impl="transformers")
    assert (code, "no experts that native layers compute" in reason) == ("inert", True), reason


ADDED = """
from srv.platform.facts import BackendSpec, OpSpec, Requires

def unless_wide(device, call):
    return "it is too wide" if call.sizes["hidden"] > 1 << 20 else None

OP = OpSpec("experts", "nothing", unless_wide, __name__ + ":experts")
SPEC = BackendSpec("nothing", 0, lambda context: Requires(), "", ops=(OP,))

def experts(x, *operands):
    return x * 0
"""


def test_another_package_adds_a_backend_of_experts(
    mixture: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its op computes the experts if it is named, as the plan says; those of the platform stay the default."""
    write_plugin(tmp_path, "nothing", ADDED, group="srv.backends.moe", entry="cpu.nothing", attribute="SPEC")
    monkeypatch.syspath_prepend(tmp_path)
    with engine(mixture, moe_runner_backend="nothing") as served:
        actual = [result.tokens for result in served.generate(messages(mixture.prompts))]
        assert {name for key, name in served.ready.kernels.items() if key.startswith("experts ")} == {"nothing"}
        assert served.context.kernels.differences(served.ready.kernels) == {}
    assert actual != mixture.tokens
    with engine(mixture) as served:
        assert [result.tokens for result in served.generate(messages(mixture.prompts))] == mixture.tokens
    code, reason = refusal(mixture.folder, mixture, moe_runner_backend="nothing", quantization="w8a8_int8")
    assert (code, "it has no experts_int8" in reason) == ("backend_unfit", True), reason


@covers("moe_runner_backend=auto", platform="cpu")
def test_a_plan_says_what_runs(mixture: Small) -> None:
    """The kernel plan of a mixture of experts has what the layers bind: the router, its choice, and the experts.

    The backend that is chosen automatically is the first one.
    """
    with engine(mixture) as served:
        assert {name for key, name in served.ready.kernels.items() if key.startswith("experts ")} == {BACKENDS[0]}
        planned = served.context.kernels
        assert planned.differences(served.ready.kernels) == {}
        keys = [kernel.key.split(" ")[0] for kernel in planned.kernels if kernel.name is not None]
        assert {"router", "route_experts", "experts"} <= set(keys)


def chosen(small: Small) -> list[list[int]]:
    """How often transformers chooses each expert in each layer, for all tokens of prompts and outputs but the last."""
    config = small.model.config
    counts = [torch.zeros(config.num_experts, dtype=torch.int64) for _ in range(config.num_hidden_layers)]
    for prompt, output in zip(small.prompts, small.tokens, strict=True):
        tokens = torch.tensor([[*prompt, *output[:-1]]])
        with torch.no_grad():
            logits = small.model(tokens, output_router_logits=True).router_logits
        for count, logit in zip(counts, logits, strict=True):
            count += torch.bincount(logit.topk(config.num_experts_per_tok).indices.flatten(), minlength=len(count))
    return [count.tolist() for count in counts]


def counted(served: CheckedEngine, small: Small) -> ExpertUsage:
    assert served.executor.control(StartExpertCounts()) == [Answer()]
    assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
    (answer,) = served.executor.control(ReadExpertCounts())
    assert answer.experts is not None
    return answer.experts


@covers(
    *("expert_distribution_recorder_mode=stat", "expert_distribution_recorder_mode=per_pass"),
    "expert_distribution_recorder_buffer_size=-1",
    platform="cpu",
)
def test_expert_distribution_recorder_mode(mixture: Small, tmp_path: Path) -> None:
    """What is counted are the choices of transformers, in one table or in one per step; without a mode nothing is."""
    tokens = sum(map(len, mixture.prompts)) + sum(len(output) - 1 for output in mixture.tokens)
    with engine(
        mixture, expert_distribution_recorder_mode="stat", expert_distribution_recorder_buffer_size=-1
    ) as served:
        usage = counted(served, mixture)
        (record,) = usage.records
        assert (usage.layers, record.tokens, record.counts) == ([0, 1, 2], tokens, chosen(mixture))
        assert served.executor.control(ReadExpertCounts())[0].experts == ExpertUsage("stat", True, [0, 1, 2], [])
        assert ("experts_recorded" in served.stats().slow_steps) == bool(served.ready.graph_rows)
        assert served.executor.control(StopExpertCounts()) == [Answer()]
        assert "no record is being made" in (served.executor.control(StopExpertCounts())[0].error or "")
    with engine(mixture, expert_distribution_recorder_mode="per_pass") as served:
        usage = counted(served, mixture)
        assert len(usage.records) > 1
        assert {record.steps for record in usage.records} == {1}
        assert torch.tensor([record.counts for record in usage.records]).sum(0).tolist() == chosen(mixture)
    with engine(mixture) as served:
        assert "--expert-distribution-recorder-mode" in (served.executor.control(StartExpertCounts())[0].error or "")
    dense = make_small("llama", tmp_path / "dense", num_hidden_layers=1)
    assert refusal(dense.folder, dense, expert_distribution_recorder_mode="stat")[0] == "inert"
    assert refusal(mixture.folder, mixture, expert_distribution_recorder_mode="per_token")[0] == "planned"


@covers("enable_expert_distribution_metrics=true", "enable_expert_distribution_metrics=false", platform="cpu")
def test_enable_expert_distribution_metrics(mixture: Small, tmp_path: Path) -> None:
    """The load is that of all steps, whether they are recorded or not; a model without experts has none."""
    with engine(
        mixture, expert_distribution_recorder_mode="per_pass", enable_expert_distribution_metrics=True
    ) as served:
        before = expert_load(served)
        passes = torch.tensor([record.counts for record in counted(served, mixture).records])
        assert served.executor.control(StopExpertCounts()) == [Answer()]
        after = expert_load(served)
        assert torch.tensor(after.mean) - torch.tensor(before.mean) == pytest.approx(passes.sum(0).float().mean(1))
        busiest = torch.tensor(after.busiest) - torch.tensor(before.busiest)
        assert (after.layers, busiest.tolist()) == ([0, 1, 2], passes.amax(2).sum(0).tolist())
        served.generate(messages(mixture.prompts))
        assert all(one > other for one, other in zip(expert_load(served).mean, after.mean, strict=True))
    for drafts in ({}, {"speculative_algorithm": "NGRAM"}):  # with drafts, steps are timed during the start
        with engine(mixture, enable_expert_distribution_metrics=True, **drafts) as served:
            assert served.context.resolved.config.graphs.disable_graphs
            served.generate(messages(mixture.prompts))
            computed = served.stats().computed_tokens * mixture.model.config.num_experts_per_tok
            assert expert_load(served).mean == [computed / mixture.model.config.num_experts] * 3
    with engine(mixture, expert_distribution_recorder_mode="stat") as served:
        assert served.executor.control(ReadExpertLoad()) == [Answer()]
    for other, code in (
        ({"no_disable_graphs": True}, "excluded"),
        ({"enable_torch_compile": True}, "excluded"),
        ({"no_enable_metrics": True}, "inert"),
    ):
        with pytest.raises(Refusal) as refused, engine(mixture, enable_expert_distribution_metrics=True, **other):
            pass
        assert code in [rejection.code for rejection in refused.value.rejections], str(refused.value)
    dense = make_small("llama", tmp_path / "dense", num_hidden_layers=1)
    code, reason = refusal(dense.folder, dense, enable_expert_distribution_metrics=True)
    assert (code, "no experts that native layers compute" in reason) == ("inert", True), reason


def expert_load(served: CheckedEngine) -> ExpertLoad:
    (answer,) = served.executor.control(ReadExpertLoad())
    assert answer.expert_load is not None
    return answer.expert_load


def test_a_placement_of_experts_is_read_and_refused(mixture: Small) -> None:
    """That of a record, whose counts are named; a value that is none is refused for that first."""
    with engine(mixture, expert_distribution_recorder_mode="stat") as served:
        usage = counted(served, mixture)
    (record,) = usage.records
    dump = json.dumps({"layers": usage.layers, "logical_count": record.counts})
    code, reason = refusal(mixture.folder, mixture, init_expert_location=dump)
    assert (code, "other placements are not implemented yet" in reason) == ("planned", True), reason
    assert f"(read: counts of {sum(map(sum, record.counts)):,} choices among the" in reason
    for value, wrong in (("random", "not_found"), ('{"logical_count": []}', "expert_location")):
        assert refusal(mixture.folder, mixture, init_expert_location=value)[0] == wrong


@covers("expert_distribution_recorder_buffer_size=1", "expert_distribution_recorder_buffer_size=2", platform="cpu")
def test_expert_distribution_recorder_buffer_size(mixture: Small) -> None:
    """Only the last steps are kept, whether they are added up or not."""
    kept = {}
    for mode in ("stat", "per_pass"):
        with engine(
            mixture, expert_distribution_recorder_mode=mode, expert_distribution_recorder_buffer_size=2
        ) as served:
            kept[mode] = counted(served, mixture).records
    assert [record.steps for record in kept["per_pass"]] == [1, 1]
    (both,) = kept["stat"]
    assert (both.steps, both.tokens) == (2, sum(record.tokens for record in kept["per_pass"]))
    assert both.counts == torch.tensor([record.counts for record in kept["per_pass"]]).sum(0).tolist()
    with engine(
        mixture, expert_distribution_recorder_mode="per_pass", expert_distribution_recorder_buffer_size=1
    ) as served:
        assert counted(served, mixture).records == kept["per_pass"][1:]
