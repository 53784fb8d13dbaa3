"""NPU graphs: the same storages, captured host lengths unless updated, and what a capture refuses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 128


class Layers:
    """Attention calls with a cache and an output buffer each, like the layers of a model in decode."""

    def __init__(self, sdk: Any, count: int = 1) -> None:
        self.sdk = sdk
        self.query = torch.randn(2, 1, HEADS * DIM).half().to("npu:0")
        self.caches = [torch.randn(5, BLOCK, KV_HEADS * DIM).half().to("npu:0") for _ in range(count)]
        self.table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).to("npu:0")
        self.outs = [torch.empty_like(self.query) for _ in range(count)]
        self.lse = torch.empty(1, dtype=torch.float16, device="npu:0")

    def options(self, lengths: list[int]) -> dict[str, Any]:
        return {
            "actual_seq_lengths_kv": lengths,
            "block_table": self.table,
            "block_size": BLOCK,
            "num_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "scale": DIM**-0.5,
            "input_layout": "BSH",
        }

    def run(self, lengths: list[int]) -> Tensor:
        for cache, out in zip(self.caches, self.outs, strict=True):
            self.sdk.npu_fused_infer_attention_score.out(
                self.query, cache, cache, out=[out, self.lse], **self.options(lengths)
            )
        return self.outs[0] * 2 + self.outs[-1]

    def eager(self, *lengths: list[int]) -> Tensor:
        """The result of an eager step, with one list of lengths per layer."""
        outs = [
            self.sdk.npu_fused_infer_attention_score(self.query, cache, cache, **self.options(one))[0]
            for cache, one in zip(self.caches, lengths, strict=True)
        ]
        return (outs[0] * 2 + outs[-1]).cpu()


def captured(sdk: Any, layers: Layers, lengths: list[int], updatable: bool = True) -> tuple[Any, Tensor]:
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph, auto_dispatch_capture=updatable):
        result = layers.run(lengths)
    return graph, result


def test_a_replay_keeps_the_lengths_of_the_capture_unless_they_are_updated(sdk: Any) -> None:
    layers = Layers(sdk)
    lengths = [5, 6]
    graph, result = captured(sdk, layers, lengths)
    lengths[:] = [200, 9]  # the program's list is not the graph's
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([5, 6]))
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [200, 9]}])
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([200, 9]))
    assert not torch.equal(layers.eager([5, 6]), layers.eager([200, 9]))
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([200, 9]))


def test_one_update_is_for_all_layers_or_there_is_one_for_each(sdk: Any) -> None:
    layers = Layers(sdk, 2)
    graph, result = captured(sdk, layers, [5, 6])
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [7, 8]}])
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([7, 8], [7, 8]))
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [9, 1]}, {"actual_seq_lengths_kv": torch.tensor([2, 3])}])
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([9, 1], [2, 3]))


def test_a_replay_reads_and_writes_the_same_memory(sdk: Any) -> None:
    layers = Layers(sdk)
    graph, result = captured(sdk, layers, [5, 6])
    addresses = result.data_ptr(), layers.outs[0].data_ptr()
    for _ in range(2):
        layers.query.copy_(torch.randn(2, 1, HEADS * DIM).half())
        layers.table.copy_(torch.tensor([[3, 1], [4, 2]], dtype=torch.int32))
        graph.replay()
        assert torch.equal(result.cpu(), layers.eager([5, 6]))
    assert (result.data_ptr(), layers.outs[0].data_ptr()) == addresses


def test_a_replay_runs_operators_that_write_and_views_and_copies(sdk: Any) -> None:
    x = torch.zeros(4, 6, device="npu:0")
    slots = torch.tensor([[1], [3]], dtype=torch.int32).to("npu:0")
    pool = torch.zeros(8, 6, device="npu:0")
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        sdk.npu_scatter_nd_update_(pool, slots, x[1:3] + 1)
        half = x[:, ::2].to(torch.float16).contiguous()
        first, rest = x.split([1, 3])
        joined = torch.cat([first * 3, rest.flatten()[:6].view(1, 6)])
        largest = joined.max(-1)
        total = torch.zeros(2, device="npu:0")
        total += joined.sum(-1)
    pool.zero_()
    x.copy_(torch.arange(24.0).view(4, 6))
    graph.replay()
    host = torch.arange(24.0).view(4, 6)
    assert torch.equal(pool.cpu()[[1, 3]], host[1:3] + 1)
    assert torch.equal(half.cpu(), host[:, ::2].half())
    expected = torch.stack([host[0] * 3, host[1]])
    assert torch.equal(joined.cpu(), expected)
    assert torch.equal(largest.values.cpu(), expected.amax(-1))
    assert torch.equal(largest.indices.cpu(), expected.argmax(-1))
    graph.replay()
    assert torch.equal(total.cpu(), expected.sum(-1))


def test_a_capture_leaves_nothing_to_read(sdk: Any) -> None:
    x = torch.ones(3, device="npu:0")
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        y = x + 1
        n = torch.ones(2, dtype=torch.int32, device="npu:0")
    assert y.cpu().isnan().all()
    assert n.cpu().tolist() == [2**31 - 1] * 2
    graph.replay()
    assert y.cpu().tolist() == [2, 2, 2]
    assert n.cpu().tolist() == [1, 1]


def test_a_graph_captured_in_inference_mode_replays_outside_it(sdk: Any) -> None:
    with torch.inference_mode():
        x = torch.ones(3, device="npu:0")
        graph = sdk.npu.NPUGraph()
        with sdk.npu.graph(graph):
            y = x * 5
    graph.replay()
    assert y.cpu().tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("a copy between host and device", lambda x: x.copy_(torch.ones(3))),
        ("a copy between host and device", lambda x: torch.ones(3).to("npu:0")),
        ("a copy between host and device", lambda x: x.cpu()),
        ("a copy between host and device", lambda x: torch.empty(3).copy_(x)),
        ("reading a number on the host", lambda x: x.sum().item()),
        ("synchronize", lambda x: torch.npu.synchronize()),
        ("aten::nonzero", lambda x: x.nonzero()),
        ("aten::masked_select", lambda x: x.masked_select(x > 0)),
    ],
)
def test_a_capture_refuses_what_waits_or_crosses(sdk: Any, what: str, act: Any) -> None:
    x = torch.ones(3, device="npu:0")
    graph = sdk.npu.NPUGraph()
    refusal = pytest.raises(RuntimeError, match=f"^{what}: not permitted while a stream is being captured")
    with refusal, sdk.npu.graph(graph):
        act(x)
    assert not sdk.npu.is_current_stream_capturing()
    act(x)


def test_captures_do_not_nest_and_hold_one_capture(sdk: Any) -> None:
    x = torch.ones(3, device="npu:0")
    outer, inner = sdk.npu.NPUGraph(), sdk.npu.NPUGraph()
    with sdk.npu.graph(outer):
        assert sdk.npu.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match=r"^NPUGraph\.capture_begin: another capture is under way"):
            inner.capture_begin()
        y = x + 1
    outer.replay()
    assert y.cpu().tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"^NPUGraph\.capture_begin: this graph holds a capture"):
        outer.capture_begin()
    outer.reset()
    with pytest.raises(RuntimeError, match=r"^NPUGraph\.replay: nothing was captured"):
        outer.replay()


@pytest.mark.parametrize(
    ("update", "refusal"),
    [
        ({"actual_seq_lengths_kv": [1, 1]}, "cpu_update_input: is a mapping, must be a list of mappings"),
        ([{"scale": 2.0}], "cpu_update_input: 'scale' is no host value of npu_fused_infer_attention_score.out"),
        ([{}, {}, {}], "cpu_update_input: has 3 entries, must have one, or one for each of the 2"),
        ([{"actual_seq_lengths_kv": "tensor"}], "actual_seq_lengths_kv: is a tensor on npu:0"),
    ],
)
def test_update_refuses(sdk: Any, update: Any, refusal: str) -> None:
    graph, _ = captured(sdk, Layers(sdk, 2), [5, 6])
    if update == [{"actual_seq_lengths_kv": "tensor"}]:
        update = [{"actual_seq_lengths_kv": torch.ones(2, dtype=torch.int32, device="npu:0")}]
    with pytest.raises(RuntimeError, match=rf"^NPUGraph\.update: {refusal}"):
        graph.update(cpu_update_input=update)


def test_update_needs_auto_dispatch_capture(sdk: Any) -> None:
    graph, _ = captured(sdk, Layers(sdk), [5, 6], updatable=False)
    with pytest.raises(RuntimeError, match="captured without auto_dispatch_capture=True"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 1]}])


def test_an_update_waits_for_the_last_replay(sdk: Any) -> None:
    """The card would apply the new lengths to calls that still run, or lose them."""
    layers = Layers(sdk)
    graph, result = captured(sdk, layers, [5, 6])
    graph.replay()
    with pytest.raises(RuntimeError, match=r"^NPUGraph\.update: the last replay of this graph may still be running"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [7, 8]}])
    behind = sdk.npu.Event()
    behind.record()
    behind.synchronize()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [7, 8]}])
    graph.replay()
    assert torch.equal(result.cpu(), layers.eager([7, 8]))


def test_updated_lengths_are_checked_like_any_others(sdk: Any) -> None:
    layers = Layers(sdk)
    graph, _ = captured(sdk, layers, [5, 6])
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [257, 6]}])
    with pytest.raises(RuntimeError, match=r"actual_seq_lengths_kv: is .257, 6., must be within 0 and 256"):
        graph.replay()


def test_a_replay_refuses_memory_that_has_been_freed(sdk: Any) -> None:
    x = torch.ones(3, device="npu:0")
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        y = x + 1
    graph.replay()
    assert y.cpu().tolist() == [2, 2, 2]
    del x
    gc.collect()
    with pytest.raises(RuntimeError, match=r"^NPUGraph\.replay: memory that the captured aten::add.Tensor uses"):
        graph.replay()


def test_the_memory_of_a_capture_is_the_graphs(sdk: Any) -> None:
    x = torch.ones(1 << 20, device="npu:0")
    before = sdk.npu.memory_allocated()
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        (x + 1).sum()
    assert sdk.npu.memory_allocated() >= before + (4 << 20)
    del graph
    gc.collect()
    assert sdk.npu.memory_allocated() == before


def test_random_numbers_of_a_replay_are_new_ones(sdk: Any) -> None:
    x = torch.empty(64, device="npu:0")
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        x.uniform_()
    graph.replay()
    first = x.cpu()
    graph.replay()
    assert not torch.equal(x.cpu(), first)
