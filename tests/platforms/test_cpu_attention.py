"""The CPU platform's attention backend against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.errors import InternalError
from srv.memory.layout import KVLayout
from srv.models.facts import CacheGroup
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv_cpu.attention import TorchNativeAttention
from srv_kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = {"grouped": (9, 3), "one each": (4, 4), "one key head": (6, 1)}


class World:
    """A pool, page tables drawn at random, and rows with a random past; foreign slots hold NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],  # (query length, key length)
        *,
        page_size: int = 16,
        heads: tuple[int, int] = (9, 3),
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        window: int | None = None,
        soft_cap: float | None = None,
        layers: int = 1,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.page_size, self.dtype = rows, page_size, dtype
        self.layer = AttentionLayer(0, heads[0], heads[1], dim, dim**-0.5, window, soft_cap)
        counts = [-(-length // page_size) for _, length in rows]
        pages = sum(counts) + 3
        ids = (torch.randperm(pages, generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(rows), max(counts) + 2, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        shape = (pages + 1, page_size, heads[1], dim)
        group = CacheGroup("full", tuple(range(layers)), heads[1], dim, dim)
        layout = KVLayout(group, page_size, str(dtype).removeprefix("torch."))
        buffers = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2 * layers)]
        self.kv = KVBuffers(layout, pages, tuple(buffers[:layers]), tuple(buffers[layers:]))
        self.backend = TorchNativeAttention(
            BackendContext(cast(Any, None), torch.device("cpu"), self.kv, len(rows), sum(q for q, _ in rows))
        )
        self._write_past(layers)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def slots(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(begin, end)
        return self.table[row, positions // self.page_size].long(), positions % self.page_size

    def _write_past(self, layers: int) -> None:
        for row, (queries, length) in enumerate(self.rows):
            at = self.slots(row, 0, length - queries)
            for buffer in (*self.kv.keys, *self.kv.values):
                buffer[at] = self.random(length - queries, *buffer.shape[2:])

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch([query for query, _ in self.rows], [length for _, length in self.rows], self.table)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views into one matrix, as a fused projection gives them."""
        layer, tokens = self.layer, sum(query for query, _ in self.rows)
        sizes = (layer.heads, layer.kv_heads, layer.kv_heads)
        fused = self.random(tokens, sum(sizes) * layer.head_dim)
        parts = fused.split([size * layer.head_dim for size in sizes], -1)
        q, k, v = (part.view(tokens, size, layer.head_dim) for part, size in zip(parts, sizes, strict=True))
        return q, k, v

    def oracle(self, q: torch.Tensor) -> torch.Tensor:
        layer, batch, at = self.layer, self.batch, self.layer.index
        return oracles.paged_attention(
            q,
            self.kv.keys[at],
            self.kv.values[at],
            self.table,
            batch.query_lens,
            batch.kv_lens,
            layer.scale,
            layer.window,
            layer.soft_cap,
        )

    def check(self) -> None:
        q, k, v = self.inputs()
        got = self.backend.forward(self.layer, q, k, v, self.backend.plan(self.batch))
        assert got.shape == q.shape
        assert got.dtype == q.dtype
        # The oracle reads the pool, so it also proves that k and v were written where the pages say.
        begin = 0
        for row, (queries, length) in enumerate(self.rows):
            at = self.slots(row, length - queries, length)
            assert torch.equal(self.kv.keys[0][at], k[begin : begin + queries])
            assert torch.equal(self.kv.values[0][at], v[begin : begin + queries])
            begin += queries
        tolerance = TOLERANCE[self.dtype] * (4 if self.layer.soft_cap else 1)
        torch.testing.assert_close(got.double(), self.oracle(q), rtol=tolerance, atol=tolerance)


def ragged() -> st.SearchStrategy[list[tuple[int, int]]]:
    decode = st.integers(1, 300).map(lambda length: (1, length))
    extend = st.tuples(st.integers(2, 40), st.integers(0, 200)).map(lambda pair: (pair[0], sum(pair)))
    return st.lists(st.one_of(decode, extend), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=ragged(),
    page_size=st.sampled_from((1, 16, 128)),
    heads=st.sampled_from(sorted(HEADS.values())),
    dim=st.sampled_from((32, 64, 128)),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    window=st.sampled_from((None, None, 1, 7, 64)),
    soft_cap=st.sampled_from((None, None, 5.0)),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_dense_attention(rows: list[tuple[int, int]], **options: Any) -> None:
    World(rows, **options).check()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(1, 33)] * 5, id="equal lengths"),
        pytest.param([(1, 5), (1, 1000), (1, 17), (1, 900)], id="lengths far apart"),
        pytest.param([(8, 8)], id="fresh prompt"),
        pytest.param([(300, 300), (1, 40)], id="prompt of several blocks"),
        pytest.param([(300, 700)], id="blocks behind a prefix"),
        pytest.param([(1, 4), (5, 9), (1, 20), (3, 3)], id="mixed"),
    ],
)
def test_shapes_that_take_each_path(rows: list[tuple[int, int]], dtype: torch.dtype, heads: tuple[int, int]) -> None:
    World(rows, heads=heads, dtype=dtype).check()


@pytest.mark.parametrize("rows", [[(1, 500), (1, 3)], [(300, 300)], [(270, 600), (1, 90)]])
@pytest.mark.parametrize(("window", "soft_cap"), [(50, None), (None, 10.0), (50, 10.0)])
def test_windows_and_soft_caps_over_blocks(
    rows: list[tuple[int, int]], window: int | None, soft_cap: float | None
) -> None:
    World(rows, window=window, soft_cap=soft_cap).check()


@pytest.mark.parametrize("rows", [[(1, 50)], [(4, 50)]])
def test_pages_that_follow_one_another_are_read_in_place(rows: list[tuple[int, int]]) -> None:
    world = World(rows)
    world.table[0, :4] = torch.arange(1, 5)
    for buffer in (*world.kv.keys, *world.kv.values):
        buffer[1:5] = world.random(4, *buffer.shape[1:])
    world.check()


def test_layers_of_different_windows_share_one_plan() -> None:
    world = World([(1, 100), (4, 60)], layers=2)
    plan = world.backend.plan(world.batch)
    for index, window in ((0, None), (1, 8), (0, None)):
        world.layer = replace(world.layer, index=index, window=window)
        q, k, v = world.inputs()
        got = world.backend.forward(world.layer, q, k, v, plan)
        torch.testing.assert_close(got.double(), world.oracle(q), rtol=2e-5, atol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    world = World([(1, 40), (1, 700), (1, 350), (1, 41)])
    q, k, v = world.inputs()
    together = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    for row, (_, length) in enumerate(world.rows):
        one, single = slice(row, row + 1), AttentionBatch([1], [length], world.table[row : row + 1])
        alone = world.backend.forward(world.layer, q[one], k[one], v[one], world.backend.plan(single))
        torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-6)


def test_nan_in_one_row_stays_in_it() -> None:
    world = World([(1, 40), (1, 45), (6, 20)])
    q, k, v = world.inputs()
    k[1] = v[1] = torch.nan
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got[1].isnan().all()
    assert got[[0, *range(2, 8)]].isfinite().all()


def test_pool_of_another_dtype_than_the_model() -> None:
    world = World([(1, 40), (5, 30)], dtype=torch.bfloat16)
    q, k, v = (tensor.float() for tensor in world.inputs())
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), world.oracle(q), rtol=2e-2, atol=2e-2)


def test_without_a_pool_it_refuses() -> None:
    with pytest.raises(InternalError, match="without a KV pool"):
        TorchNativeAttention(BackendContext(cast(Any, None), torch.device("cpu"), None, 1, 1))
