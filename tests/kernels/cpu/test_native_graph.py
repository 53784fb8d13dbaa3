"""Captured steps: a replay returns the same as a call, for the current contents of the inputs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from every import every
from torch import Tensor

from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool, NotCapturable
from srv_kernels.cpu.library import load

DIM = 64
GENERATOR = torch.Generator().manual_seed(3)
WEIGHT = torch.rand(DIM, generator=GENERATOR)
TABLE = torch.randn(10, DIM, generator=GENERATOR)
INTEGERS = torch.randint(-128, 128, (DIM, DIM), generator=GENERATOR, dtype=torch.int8)
LOADED = load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_linear, native_ops

    LINEAR = native_linear.linear(torch.randn(DIM, DIM, generator=GENERATOR), None)
    GATES = native_linear.linear(
        torch.randn(2 * DIM, DIM, generator=GENERATOR), torch.randn(2 * DIM, generator=GENERATOR)
    )
    WEIGHT_ONLY = native_linear.Int8WeightLinear(INTEGERS, WEIGHT / 512)
    W8A8 = native_linear.W8A8Linear(INTEGERS, WEIGHT / 512)

pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no native kernels here: {LOADED.reason}")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """The mode in which core captures and replays."""
    with torch.inference_mode():
        yield


def native(x: Tensor) -> Tensor:
    """Norms, linear layers and SiLU, like a layer; several tensors are freed on the way."""
    total = x
    for _ in range(3):
        normed, total = native_ops.add_rms_norm(LINEAR(native_ops.rms_norm(total, WEIGHT, 1e-5)), total, WEIGHT, 1e-5)
        total = native_ops.silu_and_mul(GATES(normed))
    return total


def with_int8_weights(x: Tensor) -> Tensor:
    """Linear layers with int8 weights, with and without quantized inputs."""
    return W8A8(WEIGHT_ONLY(x))


def mixed(x: Tensor) -> Tensor:
    """torch operators between native ones: with new results, in place, with `out`, and with several results."""
    first, second = native(x).split(DIM // 2, dim=-1)
    both = torch.cat([second, first], -1)
    both += TABLE[x[:, 0].long().clamp(0, 9)]
    out = torch.empty_like(both)
    torch.mul(both, 2.0, out=out)
    values, _ = native_ops.rms_norm(out, WEIGHT, 1e-5).sort(-1)
    return values.softmax(-1)


def captured(work: Callable[[Tensor], Tensor], x: Tensor, pool: GraphMemoryPool) -> tuple[CapturedGraph, Tensor]:
    with CapturedGraph(pool) as graph:
        out = work(x)
    return graph, out


@every("work", [native, with_int8_weights, mixed])
@every("rows", [1, 5])
@pytest.mark.slow
def test_a_replay_returns_the_same_as_a_call(work: Callable[[Tensor], Tensor], rows: int) -> None:
    x = torch.randn(rows, DIM)
    graph, out = captured(work, x, GraphMemoryPool())
    graph.replay()
    assert torch.equal(out, work(x))
    for _ in range(3):
        x.copy_(torch.randn(rows, DIM) * 3)
        gc.collect()  # a replay must not depend on objects of the capture
        graph.replay()
        assert torch.equal(out, work(x))


def test_a_replay_works_after_a_larger_call_has_moved_the_scratch_memory() -> None:
    """Inputs in bfloat16 are widened, and quantized to int8, in memory that moves as it grows."""
    integers = torch.randint(-128, 128, (DIM, DIM), dtype=torch.int8)
    plain = native_linear.linear(torch.randn(DIM, DIM).bfloat16(), None)
    w8a8 = native_linear.W8A8Linear(integers, WEIGHT / 512)

    def work(x: Tensor) -> Tensor:
        return w8a8(plain(x))

    x = torch.randn(2, DIM).bfloat16()
    graph, out = captured(work, x, GraphMemoryPool())
    for rows in (300, 3000):
        work(torch.randn(rows, DIM).bfloat16())
        x.copy_(torch.randn(2, DIM))
        graph.replay()
        assert torch.equal(out, work(x))


def test_a_capture_runs_no_native_call_and_sees_zeros_in_reused_memory() -> None:
    pool = GraphMemoryPool()
    for _ in range(2):
        x = torch.randn(2, DIM)  # a graph does not keep its inputs alive
        graph, out = captured(native, x, pool)
        assert not bool(out.any())
        graph.replay()
        assert bool(out.all())
        del graph, out
        gc.collect()


def test_a_native_result_may_be_an_index() -> None:
    """During capture the index is 0; a replay uses its current value."""
    x, logits = torch.randn(3, DIM), torch.randn(3, DIM)

    def work(x: Tensor) -> Tensor:
        chosen, _ = native_ops.most_likely(native_ops.rms_norm(logits, WEIGHT, 1e-5))
        return x + TABLE[chosen % 10]

    graph, out = captured(work, x, GraphMemoryPool())
    logits.copy_(torch.randn(3, DIM))
    graph.replay()
    assert torch.equal(out, work(x))


def test_an_operator_that_fails_on_zeros_is_not_captured() -> None:
    def work(x: Tensor) -> Tensor:
        _, finite = native_ops.most_likely(x)
        return 7 // finite.long()

    with pytest.raises(NotCapturable, match="its inputs are not computed yet"):
        captured(work, torch.randn(3, DIM), GraphMemoryPool())


def test_native_work_is_one_call_and_torch_is_counted() -> None:
    graph, _ = captured(native, torch.randn(2, DIM), GraphMemoryPool())
    assert (graph.native_calls, graph.torch_calls) == (15, 0)
    graph, _ = captured(with_int8_weights, torch.randn(2, DIM), GraphMemoryPool())
    assert (graph.native_calls, graph.torch_calls) == (2, 0)
    graph, _ = captured(mixed, torch.randn(2, DIM), GraphMemoryPool())
    assert graph.native_calls == 16
    assert graph.torch_calls > 3


def test_memory_of_freed_tensors_is_reused_also_by_other_graphs() -> None:
    """Twenty-one rows of tensors are created, but only a few are alive at a time."""
    pool = GraphMemoryPool()
    captured(native, torch.randn(8, DIM), pool)
    row = 8 * DIM * 4
    assert row < pool.bytes <= 8 * row
    before = pool.bytes
    kept = [captured(native, torch.randn(rows, DIM), pool) for rows in (4, 2, 1)]
    assert pool.bytes <= before + row
    assert len(kept) == 3


def test_two_graphs_with_one_pool_replay_in_turn() -> None:
    pool = GraphMemoryPool()
    wide, narrow = torch.randn(8, DIM), torch.randn(2, DIM)
    pairs = [(*captured(mixed, x, pool), x) for x in (wide, narrow)]
    for _ in range(3):
        for graph, out, x in pairs:
            x.copy_(torch.randn(*x.shape))
            graph.replay()
            assert torch.equal(out, mixed(x))


def test_a_value_read_from_a_tensor_cannot_be_captured() -> None:
    with pytest.raises(NotCapturable, match=r"item.* reads a value of a tensor"):
        captured(lambda x: native_ops.rms_norm(x, WEIGHT, float(x[0, 0])), torch.rand(1, DIM), GraphMemoryPool())
    x = torch.ones(1, DIM)
    graph, out = captured(native, x, GraphMemoryPool())  # the failed capture has ended
    graph.replay()
    assert torch.equal(out, native(x))


def test_strides_and_alignment_of_the_pool() -> None:
    pool = GraphMemoryPool()
    for shape, stride in (((3, 5), (5, 1)), ((4, 2), (1, 4)), ((), ()), ((0, 7), (7, 1))):
        like = pool.zeros_like(torch.empty_strided(shape, stride, dtype=torch.float64))
        assert (like.shape, like.stride(), like.dtype) == (torch.Size(shape), stride, torch.float64)
        assert like.data_ptr() % 64 == 0


def test_an_operator_that_changes_its_input_and_has_results_is_replayed() -> None:
    """Batch norm updates its running mean in place, and returns results too."""
    mean, variance = torch.zeros(DIM), torch.ones(DIM)

    def work(x: Tensor) -> Tensor:
        return torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.5, 1e-5)[0]

    x = torch.randn(4, DIM)
    graph, out = captured(work, x, GraphMemoryPool())
    x.copy_(torch.randn(4, DIM) * 2)
    before = mean.clone()
    graph.replay()
    torch.testing.assert_close(mean, 0.5 * before + 0.5 * x.mean(0))
    torch.testing.assert_close(out, (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt())


def test_a_result_whose_size_depends_on_values_cannot_be_captured() -> None:
    with pytest.raises(NotCapturable, match="depends on values"):
        captured(lambda x: x[x > 0], torch.randn(3, DIM), GraphMemoryPool())


def test_graphs_do_not_nest() -> None:
    with (
        CapturedGraph(GraphMemoryPool()),
        pytest.raises(RuntimeError, match="do not nest"),
        CapturedGraph(GraphMemoryPool()),
    ):
        pass
    x = torch.randn(1, DIM)
    graph, out = captured(native, x, GraphMemoryPool())
    graph.replay()
    assert torch.equal(out, native(x))


def test_capture_does_not_import_torchs_compiler() -> None:
    """Its 800 modules need as much memory as a small model, and a second at every start."""
    code = (
        "import sys, torch\n"
        "from srv_kernels.cpu.captured_graph import GraphMemoryPool, CapturedGraph\n"
        "with torch.inference_mode(), CapturedGraph(GraphMemoryPool()):\n"
        "    torch.empty(2).zero_()\n"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.strip() == "[]"
