"""Backend "ascend" against attention in float64, row by row: every layout it takes, both dtypes, and graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import context
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, GraphKey
from srv_kernels import oracles
from srv_npu.attention import AscendAttention, AttentionMetadata
from srv_npu.limits import PAGE
from srv_npu.platform import NpuPlatform

# Scores and sums in float32, one rounding of the result to 8 or 11 bits, and of the weights on the way to it.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCES)
KV_HEADS = 2
FOREIGN = 40  # a page that no row of a test owns
LENGTHS = [(64, 64), (80, 80), (128, 128), (192, 192), (192, 128)]  # of keys, of values


def layer(dim: int, heads: int = 6, **traits: Any) -> AttentionLayer:
    return AttentionLayer(index=0, heads=heads, kv_heads=KV_HEADS, head_dim=dim, scale=dim**-0.5, **traits)


class World:
    """A pool, rows that own pages of it in a shuffled order, and everything ever written for each row."""

    def __init__(
        self,
        platform: NpuPlatform,
        dim: int,
        dtype: torch.dtype,
        rows: int,
        foreign: float = 0.0,
        value_dim: int | None = None,
        window: int | None = None,
    ) -> None:
        self.value_dim = value_dim or dim
        self.context: BackendContext = context(
            platform, dim=dim, value_dim=value_dim, kv_heads=KV_HEADS, dtype=str(dtype).removeprefix("torch.")
        )
        assert self.context.kv is not None
        for buffer in (*self.context.kv.keys, *self.context.kv.values):
            buffer.fill_(foreign)
        self.layer, self.dtype, self.device = layer(dim, window=window), dtype, platform.device(0)
        self.backend = AscendAttention(self.context)
        self.table = (torch.randperm(FOREIGN - 1)[: rows * 4] + 1).view(rows, 4).to(torch.int32)
        self.keys: list[Tensor] = [torch.empty(0, KV_HEADS, dim, dtype=dtype) for _ in range(rows)]
        self.values = [torch.empty(0, KV_HEADS, self.value_dim, dtype=dtype) for _ in range(rows)]

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Plan a step and wait for its copies, because the test drops the backend, and what they read, after it."""
        metadata = self.backend.plan(batch)
        self.context.transfers.streams.compute.record().synchronize()
        return metadata

    def batch(self, query_lens: Sequence[int], graph: int | None = None) -> AttentionBatch:
        kv_lens = [len(keys) + count for keys, count in zip(self.keys, query_lens, strict=True)]
        table = self.table.clone()
        for row, length in enumerate(kv_lens):
            table[row, -(-length // PAGE) :] = 0
            if self.layer.window is not None:  # pages behind the window are other requests' by now
                table[row, : max(0, length - query_lens[row] + 1 - self.layer.window) // PAGE] = FOREIGN
        width = 4 if graph is not None else max(-(-length // PAGE) for length in kv_lens)
        return AttentionBatch(query_lens, kv_lens, table[:, :width].to(self.device), graph)

    def fresh(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a step, on the host."""
        return self.cut(self.fused(tokens))

    def fused(self, tokens: int) -> Tensor:
        heads, dim = self.layer.heads, self.layer.head_dim
        return torch.randn(tokens, heads * dim + KV_HEADS * (dim + self.value_dim)).to(self.dtype)

    def cut(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as a fused projection gives them: slices of one matrix."""
        heads, dim = self.layer.heads, self.layer.head_dim
        q, k, v = fused.split((heads * dim, KV_HEADS * dim, KV_HEADS * self.value_dim), -1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (KV_HEADS, dim)), v.unflatten(-1, (KV_HEADS, -1))

    def expect(self, query_lens: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember the step's keys and values, and attend in float64."""
        parts, begin = [], 0
        for row, count in enumerate(query_lens):
            tokens = slice(begin, begin + count)
            self.keys[row] = torch.cat((self.keys[row], k[tokens]))
            self.values[row] = torch.cat((self.values[row], v[tokens]))
            parts.append(dense(self.layer, q[tokens], self.keys[row], self.values[row]))
            begin += count
        return torch.cat(parts)

    def step(self, *query_lens: int) -> None:
        """One step through the backend, equal to the dense one."""
        fused = self.fused(sum(query_lens))
        metadata = self.backend.plan(self.batch(query_lens))
        got = self.backend.forward(self.layer, *self.cut(fused.to(self.device)), metadata)
        assert got.dtype == self.dtype
        close(got, self.expect(query_lens, *self.cut(fused)))


def dense(of: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [queries, heads, dim]; the last query sees every key that its window does not hide."""
    sharing = of.heads // of.kv_heads
    k, v = (tensor.double().repeat_interleave(sharing, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * of.scale
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    if of.bidirectional:
        distance = distance.abs()
    hidden = (distance < 0) | (distance >= (of.window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), LENGTHS)
def test_steps_of_every_kind_equal_dense_attention(
    platform: NpuPlatform, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Prompts that end before, at and past a page; then extensions, decode, and both in one step."""
    world = World(platform, dim, dtype, rows=4, value_dim=value_dim)
    world.step(127, 128, 129, 2)
    world.step(1, 1, 1, 1)
    world.step(140, 1, 3, 1)
    world.step(1, 130, 1, 1)
    world.step(1, 1, 1, 1)


@pytest.mark.parametrize(("dim", "value_dim"), LENGTHS)
def test_one_row_alone(platform: NpuPlatform, dim: int, value_dim: int) -> None:
    world = World(platform, dim, torch.bfloat16, rows=1, value_dim=value_dim)
    for count in (1, 1, 300, 1):
        world.step(count)


@pytest.mark.parametrize(("dim", "value_dim"), LENGTHS)
def test_nothing_is_read_that_a_row_does_not_own(platform: NpuPlatform, dim: int, value_dim: int) -> None:
    """Pages of other rows, and the rest of a row's last page, hold NaN."""
    world = World(platform, dim, torch.bfloat16, rows=3, foreign=float("nan"), value_dim=value_dim)
    world.step(100, 1, 130)
    world.step(1, 1, 1)


class CapturedStep:
    """A decode step of all rows of a world, captured; buffers are static, as the runner's are."""

    def __init__(self, world: World, platform: NpuPlatform) -> None:
        graphs = platform.graphs
        assert graphs is not None
        self.world, self.graphs, self.rows = world, graphs, len(world.keys)
        self.inputs = tuple(tensor.contiguous().to(world.device) for tensor in world.fresh(self.rows))
        self.table = world.batch([1] * self.rows, graph=self.rows).page_table
        captured = self.plan()
        self.out = graphs.capture(
            GraphKey("decode", self.rows),
            lambda: world.backend.forward(world.layer, self.inputs[0], *self.inputs[1:], captured),
        )

    def plan(self) -> AttentionMetadata:
        batch = self.world.batch([1] * self.rows, graph=self.rows)
        self.table.copy_(batch.page_table)
        return self.world.backend.plan(replace(batch, page_table=self.table))

    def replay(self) -> None:
        """One more token a row, equal to dense attention."""
        q, k, v = self.world.fresh(self.rows)
        for kept, new in zip(self.inputs, (q, k, v), strict=True):
            kept.copy_(new)
        self.graphs.replay(GraphKey("decode", self.rows), [self.plan()])
        close(self.out, self.world.expect([1] * self.rows, q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), LENGTHS)
def test_a_captured_step_takes_the_lengths_of_each_replay(
    platform: NpuPlatform, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Lengths, pages, queries, keys and values change between replays."""
    world = World(platform, dim, dtype, rows=4, value_dim=value_dim)
    world.step(5, 126, 130, 1)
    step = CapturedStep(world, platform)
    for _ in range(4):
        step.replay()


def test_a_replay_may_be_asked_for_while_the_last_one_runs(platform: NpuPlatform) -> None:
    """As the next step is, where steps overlap: nothing has waited for the first of the two."""
    world = World(platform, 64, torch.bfloat16, rows=2)
    world.step(5, 3)
    step = CapturedStep(world, platform)
    metadata = step.plan()
    for _ in range(2):
        step.graphs.replay(GraphKey("decode", step.rows), [metadata])
    q, k, v = (each.cpu() for each in step.inputs)
    close(step.out, world.expect([1, 1], q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_with_values_shorter_than_keys_equal_the_oracle(
    platform: NpuPlatform, seed: int, captured: bool, dtype: torch.dtype
) -> None:
    """Random rows prefill, extend and decode; the oracle reads the pool that the backend wrote, page by page."""
    chance = random.Random(seed)
    rows = chance.randint(2, 6)
    world = World(platform, 192, dtype, rows, value_dim=128)
    steps = [[chance.randint(1, 140) for _ in range(rows)], [chance.choice((1, 1, 3, 70)) for _ in range(rows)]]
    for query_lens in [*steps, [1] * rows]:
        batch = world.batch(query_lens)
        q, k, v = world.fresh(sum(query_lens))
        on_device = tuple(tensor.to(world.device) for tensor in (q, k, v))
        got = world.backend.forward(world.layer, on_device[0], *on_device[1:], world.backend.plan(batch))
        world.expect(query_lens, q, k, v)
        assert got.shape == (sum(query_lens), world.layer.heads, 128)
        close(got, oracle(world, q, batch))
    if captured:
        step = CapturedStep(world, platform)
        for _ in range(2):
            batch = world.batch([1] * rows)
            step.replay()
            close(step.out, oracle(world, step.inputs[0].cpu(), batch))


def oracle(world: World, q: Tensor, batch: AttentionBatch) -> Tensor:
    """float64 [tokens, heads, value_dim] over the backend's own pool."""
    kv = world.context.kv
    assert kv is not None
    keys, values = (pool[0].cpu().unflatten(-1, (KV_HEADS, -1)) for pool in (kv.keys, kv.values))
    table = batch.page_table.cpu()
    return oracles.paged_attention(q, keys, values, table, batch.query_lens, batch.kv_lens, world.layer.scale)


def test_metadata_of_a_graph_keeps_its_addresses(platform: NpuPlatform) -> None:
    world = World(platform, 64, torch.bfloat16, rows=3)
    first, second = (world.plan(world.batch([1, 1, 1], graph=3)) for _ in range(2))
    eager = world.plan(world.batch([1, 1, 1]))
    assert first.slots.data_ptr() == second.slots.data_ptr() != eager.slots.data_ptr()


@pytest.mark.parametrize(("value_dim", "ends"), [(192, None), (128, [1, 2, 3])])
@pytest.mark.parametrize("graph", [None, 3])
def test_ends_of_single_queries_are_worked_out_once_a_step(
    platform: NpuPlatform, value_dim: int, ends: list[int] | None, graph: int | None
) -> None:
    """And for the one layout alone that asks for them: every layer of the step is given the same list."""
    world = World(platform, 192, torch.bfloat16, rows=3, value_dim=value_dim)
    step = world.plan(world.batch([1, 1, 1], graph=graph)).step
    assert step is not None
    decode = step.rows[None].decode
    assert decode is not None
    assert decode.ends == ends


def test_layers_that_the_operator_does_not_compute_are_refused(platform: NpuPlatform) -> None:
    world = World(platform, 64, torch.bfloat16, rows=2)
    supports = world.backend.supports
    assert supports(world.layer) is None
    assert supports(replace(world.layer, soft_cap=30.0)) == "its operator does not compute a soft cap of 30.0"
    assert supports(replace(world.layer, window=4)) is None
    assert supports(replace(world.layer, sinks=True)) == "its operator does not compute attention sinks"
    assert supports(replace(world.layer, head_dim=72)) == "head_dim 72 is not a multiple of 16"
    two_lengths = World(platform, 192, torch.bfloat16, rows=2, value_dim=128)
    assert two_lengths.backend.supports(two_lengths.layer) is None
    assert two_lengths.backend.supports(replace(two_lengths.layer, window=4)) == (
        "keys of 192 and values of 128 elements with a sliding window of 4 tokens; only keys and values of equal "
        "length can have one"
    )


def test_a_pool_of_another_shape_is_refused(platform: NpuPlatform) -> None:
    build = context(platform)
    assert build.kv is not None
    kv = replace(build.kv, layout=replace(build.kv.layout, page_size=64))
    with pytest.raises(InternalError, match="pages of 128 tokens, not page_token_flat pages of 64"):
        AscendAttention(replace(build, kv=kv))


@pytest.mark.parametrize(("dim", "value_dim", "max_rows"), [(128, 192, 16), (192, 64, 16), (192, 128, 4097)])
def test_a_pool_that_no_call_reads_is_refused(platform: NpuPlatform, dim: int, value_dim: int, max_rows: int) -> None:
    build = context(platform, dim=dim, value_dim=value_dim, pages=1, max_rows=max_rows)
    with pytest.raises(InternalError, match=f"keys of {dim} with values of {value_dim} .* up to {max_rows} rows"):
        AscendAttention(build)
