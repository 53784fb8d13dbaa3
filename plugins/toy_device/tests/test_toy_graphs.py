"""Captured steps on the simulated device: the same tokens as eager ones, and memory that nobody else wrote."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_toy_engine import EAGER, PLAIN, Small, messages
from test_toy_engine import paged_engine as engine

from srv.errors import Refusal
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams
from srv.worker.graphs import CapturedSteps
from srv_matrix.pytest_plugin import covers
from srv_toy_device.device import Accelerator
from srv_toy_device.facts import FACTS

if "graphs" not in FACTS.capabilities(next(iter(FACTS.profiles.values()))):
    pytest.skip("the platform does not declare the capability graphs", allow_module_level=True)
ToyGraphs = pytest.importorskip("srv_toy_device.graphs").ToyGraphs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("llama"))


def tokens(small: Small, *flags: str, **params: Any) -> list[list[int]]:
    with engine(small, *flags) as served:
        return [result.tokens for result in served.generate(messages(small, **params))]


# ---- the device


def test_a_graph_does_it_again_on_the_same_storages(toy: Accelerator) -> None:
    x = torch.arange(6.0).to("toy").view(2, 3)
    total = torch.zeros(3).to("toy")
    graph = toy.Graph()
    with toy.graph(graph):
        y = (x.t() * 2).sum(1).relu()
        total.add_(y)
    address = y.data_ptr()
    x.copy_(torch.full((2, 3), 5.0))
    graph.replay()
    assert (y.data_ptr(), y.tolist(), total.tolist()) == (address, [20.0] * 3, [26.0, 30.0, 34.0])


def test_what_the_host_knew_stays_as_it_was_unless_it_is_updated_by_name(toy: Accelerator) -> None:
    pool = torch.arange(8.0).to("toy").view(8, 1, 1)
    query, table = torch.ones(1, 1, 1).to("toy"), torch.tensor([[0, 1]], dtype=torch.int32).to("toy")
    length, factor = 1, 2.0
    graph = toy.Graph()
    with toy.graph(graph):
        read = torch.ops.toy.paged_decode(query, pool, pool, table, lengths=[length], page_size=4, scale=9.0)
        out = read * factor
    length, factor = 8, 3.0
    graph.replay()
    assert out.item() == 0.0
    graph.update(lengths=[length])
    graph.replay()
    assert out.item() == pytest.approx(14.0, abs=0.01)
    with pytest.raises(KeyError, match="no recorded operator was given width"):
        graph.update(width=3)


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (lambda x: x.to("cpu"), "a copy between host and device"),
        (lambda x: x.to("cpu", non_blocking=True), "a copy between host and device"),
        (lambda x: torch.ones(2).to("toy"), "a copy between host and device"),
        (lambda x: x.copy_(torch.ones(2)), "a copy between host and device"),
        (lambda x: x.sum().item(), "reading a number on the host"),
        (lambda x: torch.rand_like(x), "draws random numbers"),
    ],
)
def test_what_a_replay_could_not_do_again_is_refused(toy: Accelerator, work: Any, what: str) -> None:
    x = torch.zeros(2).to("toy")
    with pytest.raises(RuntimeError, match=f"{what}.* not permitted while toy:0 captures"), toy.graph(toy.Graph()):
        work(x)
    assert work(x) is not None


def test_a_graph_is_captured_once_and_before_it_is_replayed(toy: Accelerator) -> None:
    graph = toy.Graph()
    with pytest.raises(RuntimeError, match="never captured"):
        graph.replay()
    with toy.graph(graph), pytest.raises(RuntimeError, match="capturing a graph already"), toy.graph(toy.Graph()):
        pass
    with pytest.raises(RuntimeError, match="captured before"), toy.graph(graph):
        pass


def test_memory_of_a_graph_serves_again_within_it_and_is_its_own(toy: Accelerator) -> None:
    x = torch.zeros(1 << 16).to("toy")
    block = x.numel() * 4
    before = toy.memory_allocated()
    graph, memory = toy.Graph(), toy.graph_memory()
    with toy.graph(graph, memory):
        y = x
        for _ in range(20):
            y = y + 1.0
    assert toy.memory_allocated() - before == 2 * block  # the last result and the one before take turns
    other = torch.full((1 << 16,), 7.0).to("toy")
    for _ in range(2):
        graph.replay()
    assert (y[0].item(), other.min().item(), other.max().item()) == (20.0, 7.0, 7.0)
    with toy.graph(toy.Graph(), memory):
        total = x + 5.0
    assert toy.memory_allocated() - before == 3 * block, "a graph with the same memory takes the block that is free"
    del y, total, other, graph, memory
    assert toy.memory_allocated() == before


def test_a_tensor_that_grows_in_a_capture_takes_no_memory_of_another(toy: Accelerator) -> None:
    """`torch.arange` creates an empty tensor and lets it grow."""
    x = torch.zeros(8, dtype=torch.int64).to("toy")
    graph = toy.Graph()
    with toy.graph(graph):
        first = torch.arange(8, device="toy")
        total = x + first
        total = total + torch.arange(8, device="toy") * 7
        last = torch.arange(16, device="toy")
    x.fill_(100)
    for _ in range(2):
        graph.replay()
        assert total.tolist() == [100 + 8 * number for number in range(8)]
        assert (first.tolist(), last.tolist()) == (list(range(8)), list(range(16)))
    before = toy.memory_allocated()
    for _ in range(3):  # outside of a capture, its memory is counted and freed like any other
        torch.arange(1 << 16, device="toy")
    assert toy.memory_allocated() == before


def test_another_thread_s_work_is_not_recorded(toy: Accelerator) -> None:
    x = torch.zeros(1).to("toy")
    graph = toy.Graph()
    with toy.graph(graph):
        y = x + 1
        other = threading.Thread(target=lambda: x.add_(10))
        other.start()
        other.join()
    graph.replay()
    assert (x.item(), y.item(), len(graph)) == (10.0, 11.0, 1)


# ---- the engine


@pytest.mark.parametrize("overlap", [[], [PLAIN]], ids=["overlap", "plain"])
@pytest.mark.parametrize(
    "graphs",
    [[], ["--graph-batch-sizes", "6"], ["--graph-batch-sizes", "1,3"], ["--disable-graph-padding"]],
    ids=["ladder", "always-padded", "some-eager", "unpadded"],
)
def test_tokens_are_those_of_eager_steps(small: Small, graphs: list[str], overlap: list[str]) -> None:
    """Prompts of 1 to 23 tokens in chunks of 5: mixed steps lie between, and outputs cross borders of pages."""
    flags = [*overlap, "--chunked-prefill-size", "5"]
    with engine(small, *graphs, *flags) as served:
        results = [result.tokens for result in served.generate(messages(small))]
        again = [result.tokens for result in served.generate(messages(small))]
        stats = served.stats()
    assert results == again == small.tokens
    assert stats.replayed_steps > 0
    assert stats.eager_steps > 0


def test_steps_are_counted_and_rows_are_told(small: Small) -> None:
    message = RequestSpec(
        id="a", tokens=(5, 6, 7), params=SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    )
    with engine(small, PLAIN) as served:
        served.generate([message])
        stats = served.stats()
        assert (stats.replayed_steps, stats.eager_steps, stats.steps) == (8, 1, 9)
        assert served.ready.graph_rows == [1, 2, 4, 6]
        assert "1, 2, 4, 6 rows captured" in dict(served.ready.budget)["graphs"]
    with engine(small, PLAIN, EAGER) as served:
        served.generate([message])
        stats = served.stats()
        assert (stats.replayed_steps, stats.eager_steps, served.ready.graph_rows) == (0, 9, [])
        assert "graphs" not in dict(served.ready.budget)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "logit_bias": ((7, 3.0),)},
    ],
    ids=["filters", "processors"],
)
def test_sampled_tokens_are_those_of_eager_steps(small: Small, params: dict[str, Any]) -> None:
    assert tokens(small, **params) == tokens(small, EAGER, **params) != small.tokens


def test_logprobs_are_those_of_eager_steps(small: Small) -> None:
    runs = []
    for flags in ([], [EAGER]):
        with engine(small, *flags) as served:
            results = served.generate(messages(small, logprobs=2))
            runs.append([entry.logprob for result in results for entry in result.logprobs])
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)


def test_retracted_and_resumed_requests_replay_too(small: Small) -> None:
    with engine(small, "--schedule-conservativeness", "0.01", pool=64) as served:
        assert [result.tokens for result in served.generate(messages(small))] == small.tokens
        assert served.stats().retractions > 0
        assert served.stats().replayed_steps > 0


def test_lengths_that_are_not_applied_give_other_tokens(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the comparisons above worth something: a platform that forgets to apply the lengths fails them."""
    monkeypatch.setattr(ToyGraphs, "replay", lambda self, key, metadata: self._graphs[key].replay())
    assert tokens(small) != small.tokens


def _device_pools(served: LocalEngine) -> list[torch.Tensor]:
    """Key and value buffers, [(pages + 1) * 4, heads, dim] each."""
    (attention,) = served._engine.executor.worker.runner.eager._attention  # type: ignore[attr-defined]
    return [*attention._keys, *attention._values]


def _pools(served: LocalEngine) -> list[torch.Tensor]:
    """The same on the host, page by page: [pages + 1, 4, heads, dim]."""
    return [buffer.to("cpu").view(-1, 4, *buffer.shape[1:]) for buffer in _device_pools(served)]


def _written(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> set[int]:
    """Pages whose bytes differ."""
    return {
        page
        for old, new in zip(before, after, strict=True)
        for page in range(len(old))
        if not old[page].equal(new[page])
    }


def test_padded_rows_write_page_zero_and_no_other(small: Small) -> None:
    """One request in graphs of six rows, whose buffers held two; their pages are cached, and nobody may touch them."""
    first, second = messages(small)[3:]
    with engine(small, PLAIN, "--graph-batch-sizes", "6") as served:
        served.generate([first, second])
        cached = served.stats().pages_cached
        for pool in _device_pools(served):
            pool[:4] = float("nan")  # page 0: whoever reads more of it than was just written says NaN
        before = _pools(served)
        alone = RequestSpec(
            id="b", tokens=(9, 9, 9), params=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        )
        (result,) = served.generate([alone])
        assert result.error is None
        after = _pools(served)
        written = _written(before, after)
        assert 0 in written
        assert len(written - {0}) == 3  # 3 + 8 tokens, the last of which is not fed, in pages of 4
        assert served.stats().pages_cached == cached + 2
        again = served.generate([first, second])
    assert [result.tokens for result in again] == small.tokens[3:]


def test_capturing_writes_page_zero_alone(small: Small) -> None:
    with engine(small) as served:
        pools = _pools(served)
        assert all(pool[1:].count_nonzero() == 0 for pool in pools)
        assert any(pool[0].count_nonzero() for pool in pools)


def test_graphs_stay_within_what_is_reserved_for_them(small: Small) -> None:
    def reserved(served: LocalEngine) -> float:
        parts = served.context.resolved.quantities["reserved_memory"].parts
        return {part.name: part.amount for part in parts}["graphs"]

    with engine(small) as served:
        ways = served._engine.executor.worker.runner.ways  # type: ignore[attr-defined]
        (captured,) = (way for way in ways if isinstance(way, CapturedSteps))
        buffers = captured._buffers
        sizes = [tensor.nbytes for tensor in (buffers.tokens, buffers.positions, *buffers.pages, buffers.logits)]
        sizes += [block.host.nbytes() for block in captured._graphs._memory._blocks.values()]
        assert len(sizes) > 4
        assert 0 < sum(sizes) < reserved(served)
    with engine(small, EAGER) as served:
        assert reserved(served) == 0


# ---- arguments: two values of each make the engine do something else


def _counts(small: Small, *flags: str) -> tuple[list[int], int]:
    """Captured row counts, and steps replayed for three requests of equal length, which always run together."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    three = [RequestSpec(id=str(number), tokens=(9 + number, 5, 6), params=params) for number in range(3)]
    with engine(small, PLAIN, *flags) as served:
        served.generate(three)
        return served.ready.graph_rows, served.stats().replayed_steps


@covers("disable_graphs=false", "disable_graphs=true", platform="toy")
def test_disable_graphs(small: Small) -> None:
    assert _counts(small) == ([1, 2, 4, 6], 8)
    assert _counts(small, EAGER) == ([], 0)


@covers("graph_max_batch_size=2", "graph_max_batch_size=4", platform="toy")
def test_graph_max_batch_size(small: Small) -> None:
    """Three rows fit into a graph of four, and into none that is smaller."""
    assert _counts(small, "--graph-max-batch-size", "4") == ([1, 2, 4], 8)
    assert _counts(small, "--graph-max-batch-size", "2") == ([1, 2], 0)


@covers("graph_batch_sizes=1,2", "graph_batch_sizes=5", platform="toy")
def test_graph_batch_sizes(small: Small) -> None:
    assert _counts(small, "--graph-batch-sizes", "1,2") == ([1, 2], 0)
    assert _counts(small, "--graph-batch-sizes", "5") == ([5], 8)
    with pytest.raises(Refusal, match="max_running_requests is 6"), engine(small, "--graph-batch-sizes", "7"):
        pass


@covers("disable_graph_padding=false", "disable_graph_padding=true", platform="toy")
def test_disable_graph_padding(small: Small) -> None:
    sizes = ["--graph-batch-sizes", "2,4"]
    assert _counts(small, *sizes) == ([2, 4], 8)
    assert _counts(small, *sizes, "--disable-graph-padding") == ([2, 4], 0)
    assert _counts(small, "--disable-graph-padding") == ([1, 2, 3, 4, 5, 6], 8)
