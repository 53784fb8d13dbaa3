"""The CPU platform's attention backends compared with dense attention in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from every import every
from host_transfers import HOST_TRANSFERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.pools import pool_of
from srv.specs import FullAttention, KVLayout
from srv_cpu.attention import TorchNativeAttention
from srv_cpu.packed import INTERLEAVE, ORDER, tensors
from srv_kernels import oracles
from srv_kernels.cpu.library import load

LOADED = load()
NO_KERNELS = f"no native kernels here: {LOADED.reason}"
native = pytest.mark.skipif(LOADED.library is None, reason=NO_KERNELS)
NativeAttention: Any = None
if LOADED.library is not None:
    from srv_cpu.native_attention import NativeAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POOLS = (torch.float16, torch.int8, *FLOAT8)  # of the native kernels, in addition to the dtype of the queries
# With an int8 pool, queries and the softmax weights of 64 tokens are quantized to 1/32,767 of their largest magnitude.
# Errors of scores have a standard deviation of 3e-5 and reach five times that, multiplied by the spread of the values.
QUERY_ROUNDING = 4e-4
each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(TorchNativeAttention, id="torch_native"), pytest.param(NativeAttention, id="native", marks=native)],
)
SINKS = (0.5, -3.0, -math.inf, 20.0, 1e4)  # of no effect, and so large that no key has a weight
HEADS = {"grouped": (9, 3), "one each": (4, 4), "one key head": (6, 1)}


class World:
    """A pool, random page tables, and rows with random cached tokens; all other slots hold NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],  # (query length, key length)
        *,
        page_size: int = 16,
        heads: tuple[int, int] = (9, 3),
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        pool: torch.dtype | None = None,
        seed: int = 0,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi: tuple[float, ...] | None = None,
        chunk: int | None = None,
        sinks: tuple[float, ...] | None = None,
        temperature_from: int | None = None,
        layers: int = 1,
        backend: Any = TorchNativeAttention,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.page_size, self.dtype, self.pool = rows, page_size, dtype, pool or dtype
        self.layer = AttentionLayer(0, heads[0], heads[1], dim, dim**-0.5, window, soft_cap, alibi=alibi, chunk=chunk)
        self.layer = replace(self.layer, temperature_from=temperature_from)
        if sinks is not None:
            scores = tuple(sinks[head % len(sinks)] for head in range(heads[0]))
            self.layer = replace(self.layer, sinks=True, sink_scores=scores)
        counts = [-(-length // page_size) for _, length in rows]
        pages = sum(counts) + 3
        ids = (torch.randperm(pages, generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(rows), max(counts) + 2, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        self.packed = backend is NativeAttention
        plain = (pages + 1, page_size, heads[1], dim)
        group = FullAttention(tuple(range(layers)), heads[1], dim, dim)
        order = ORDER if self.packed else "page_token_head"
        layout = KVLayout(group, page_size, str(self.pool).removeprefix("torch."), order)
        shapes = tensors(layout, pages) if self.packed else layout.plain_tensors(pages)
        self.kv = pool_of(layout, shapes, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        all_nan = torch.full(plain, torch.nan)
        for index in range(layers):
            self.write(index, all_nan, all_nan)
        self.backend = backend(BackendContext(cast(Any, None), torch.device("cpu"), self.kv, len(rows), HOST_TRANSFERS))
        self._write_cached(layers)

    def keys(self, layer: int = 0) -> torch.Tensor:
        """The pool's keys, [pages, page_size, kv_heads, dim]; a copy if the pool has another layout."""
        if not self.packed:
            return self.kv.keys[layer]
        elements, scales = self._split_scales(self.kv.keys[layer])
        n = self._interleave
        elements = elements.view(*elements.shape[:3], -1, 16, n)  # [pages, heads, blocks, dim / n, 16, n]
        plain = elements.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)
        return plain if scales is None else plain * scales.permute(0, 2, 3, 1).flatten(1, 2)[..., None]

    def values(self, layer: int = 0) -> torch.Tensor:
        if not self.packed:
            return self.kv.values[layer]
        elements, scales = self._split_scales(self.kv.values[layer])
        n = self._interleave
        elements = elements.view(*elements.shape[:3], 16 // n, -1, n)  # [pages, heads, blocks, 16 / n, dim, n]
        plain = elements.permute(0, 2, 3, 5, 1, 4).flatten(1, 3)
        return plain if scales is None else plain * scales.permute(0, 2, 3, 1).flatten(1, 2)[..., None]

    @property
    def _interleave(self) -> int:
        return INTERLEAVE[self.kv.layout.dtype]

    def _split_scales(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The elements [pages, heads, blocks, 16 dim], and for int8 the scales [pages, heads, blocks, 16] of tokens."""
        flat = buffer.flatten(3)
        if self.pool != torch.int8:
            return flat, None
        return flat[..., :-64], flat[..., -64:].contiguous().view(torch.float32)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the whole pool of a layer from tensors [pages, page_size, heads, dim]."""
        for buffer, plain, are_keys in ((self.kv.keys[layer], keys, True), (self.kv.values[layer], values, False)):
            if not self.packed:
                buffer.copy_(plain)
                continue
            elements, scales = plain, None
            if self.pool == torch.int8:
                scales = plain.float().abs().amax(-1) / 127  # [pages, page_size, heads]
                elements = (plain / scales[..., None]).nan_to_num().round()
            n, (pages, size, heads, dim) = self._interleave, plain.shape
            if are_keys:
                ordered = elements.view(pages, size // 16, 16, heads, dim // n, n).permute(0, 3, 1, 4, 2, 5)
            else:
                ordered = elements.view(pages, size // 16, 16 // n, n, heads, dim).permute(0, 4, 1, 2, 5, 3)
            if scales is None:
                buffer.copy_(ordered)
                continue
            buffer[..., :-64].copy_(ordered.flatten(3))
            scale_bytes = scales.view(pages, size // 16, 16, heads).permute(0, 3, 1, 2).contiguous()
            buffer[..., -64:].copy_(scale_bytes.view(torch.int8).flatten(3))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def slots(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(begin, end)
        return self.table[row, positions // self.page_size].long(), positions % self.page_size

    def _write_cached(self, layers: int) -> None:
        for layer in range(layers):
            plain = self.keys(layer).clone(), self.values(layer).clone()
            for row, (queries, length) in enumerate(self.rows):
                at = self.slots(row, 0, length - queries)
                for buffer in plain:
                    buffer[at] = self.random(length - queries, *buffer.shape[2:]).to(buffer.dtype)
            self.write(layer, *plain)

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch([query for query, _ in self.rows], [length for _, length in self.rows], self.table)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views into one matrix, like the output of a fused projection."""
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
            self.keys(at),
            self.values(at),
            self.table,
            batch.query_lens,
            batch.kv_lens,
            layer.scale,
            layer.window,
            layer.soft_cap,
            layer.alibi,
            layer.chunk,
            layer.sink_scores,
            layer.temperature_from,
        )

    def relative_error(self) -> float:
        """The largest error of one forward pass, divided by the tolerance of the dtype.

        Infinite if k and v are not in the slots of the page table, or the output has another shape or dtype.
        """
        q, k, v = self.inputs()
        got = self.backend.forward(self.layer, q, k, v, self.backend.plan(self.batch))
        if got.shape != q.shape or got.dtype != q.dtype or not self._is_written(k, v):
            return math.inf
        tolerance = TOLERANCE[self.dtype] + (QUERY_ROUNDING if self.pool == torch.int8 else 0)
        tolerance *= 4 if self.layer.soft_cap or self.layer.temperature_from else 1
        want = self.oracle(q)
        errors = (got.double() - want).abs() / (tolerance * (1 + want.abs()))
        return float(errors.nan_to_num(nan=math.inf).max())

    def _is_written(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        begin, keys, values = 0, self.keys(), self.values()
        for row, (queries, length) in enumerate(self.rows):
            at, new = self.slots(row, length - queries, length), slice(begin, begin + queries)
            if not self._holds(keys[at], k[new]) or not self._holds(values[at], v[new]):
                return False
            begin += queries
        return True

    def _holds(self, stored: torch.Tensor, vectors: torch.Tensor) -> bool:
        """Whether slots hold the given values, rounded to the nearest value of the pool's dtype."""
        if self.pool in FLOAT8:
            return torch.equal(stored.view(torch.uint8), vectors.to(self.pool).view(torch.uint8))
        if self.pool != torch.int8:
            return torch.equal(stored, vectors.to(self.pool))
        scales = vectors.float().abs().amax(-1, keepdim=True) / 127
        return bool(((stored - vectors.float()).abs() <= scales * 0.5001).all())


def ragged() -> st.SearchStrategy[list[tuple[int, int]]]:
    decode = st.integers(1, 300).map(lambda length: (1, length))
    extend = st.tuples(st.integers(2, 40), st.integers(0, 200)).map(lambda pair: (pair[0], sum(pair)))
    return st.lists(st.one_of(decode, extend), min_size=1, max_size=6)


ANY: dict[str, Any] = {
    "rows": ragged(),
    "heads": st.sampled_from([*sorted(HEADS.values()), (34, 2)]),
    "dim": st.sampled_from((16, 32, 64, 80, 128, 512)),
    "window": st.sampled_from((None, None, 1, 7, 64)),
    "soft_cap": st.sampled_from((None, None, 5.0)),
    "chunk": st.sampled_from((None, None, 7, 64)),
    "sinks": st.sampled_from((None, None, SINKS)),
    "temperature_from": st.sampled_from((None, None, 16, 64)),
    "seed": st.integers(0, 99),
}


@settings(max_examples=60, deadline=None)
@given(page_size=st.sampled_from((16, 1, 128)), dtype=st.sampled_from(sorted(TOLERANCE, key=str)), **ANY)
def test_any_batch_agrees_with_dense_attention(rows: list[tuple[int, int]], **options: Any) -> None:
    assert World(rows, **options).relative_error() <= 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    page_size=st.sampled_from((16, 128)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    pool=st.sampled_from((None, *POOLS)),
    **ANY,
)
def test_any_batch_agrees_with_dense_attention_on_every_instruction_set(
    isa: str, rows: list[tuple[int, int]], **options: Any
) -> None:
    assert World(rows, backend=NativeAttention, **options).relative_error() <= 1


PATHS = (
    [(1, 1)],  # first token
    [(1, 33)] * 5,  # equal lengths
    [(1, 5), (1, 1000), (1, 17), (1, 900)],  # lengths far apart
    [(8, 8)],  # fresh prompt
    [(300, 300), (1, 40)],  # prompt of several blocks
    [(300, 700)],  # blocks after a cached prefix
    [(1, 4), (5, 9), (1, 20), (3, 3)],  # mixed
)


@every("heads", HEADS.values())
@every("dtype", TOLERANCE)
@every("rows", PATHS)
@each_backend
def test_shapes_of_each_code_path(
    rows: list[tuple[int, int]], dtype: torch.dtype, heads: tuple[int, int], backend: Any
) -> None:
    if backend is NativeAttention and dtype == torch.float16:
        return  # refused: see below
    assert World(rows, heads=heads, dtype=dtype, backend=backend).relative_error() <= 1


@every("heads", HEADS.values())
@every("pool", POOLS)
@every("dtype", [torch.float32, torch.bfloat16])
@every("rows", PATHS)
def test_native_pools_of_other_types(
    isa: str, rows: list[tuple[int, int]], dtype: torch.dtype, pool: torch.dtype, heads: tuple[int, int]
) -> None:
    assert World(rows, heads=heads, dtype=dtype, pool=pool, backend=NativeAttention).relative_error() <= 1


@every("pool", POOLS)
def test_int32_sums_of_the_largest_heads_and_inputs_do_not_overflow(isa: str, pool: torch.dtype) -> None:
    """The largest sums are those of 512 columns of equal magnitude, and of the softmax weights of 64 values."""
    world = World([(1, 150), (70, 200)], heads=(2, 1), dim=512, pool=pool, backend=NativeAttention)
    # Scores are 1 and -1: an overflow would change weights.
    world.layer = replace(world.layer, scale=1 / 512)
    signs = torch.tensor([1.0, -1.0])

    def alternating(tokens: int, *shape: int) -> torch.Tensor:
        return signs.repeat(tokens // 2 + 1)[:tokens].view(tokens, *[1] * len(shape)).expand(tokens, *shape)

    world.random = alternating  # type: ignore[assignment, method-assign]
    world._write_cached(1)
    queries = sum(count for count, _ in world.rows)
    q, k = torch.ones(queries, 2, 512), alternating(queries, 1, 512)
    got = world.backend.forward(world.layer, q, k, k, world.backend.plan(world.batch))
    torch.testing.assert_close(got.double(), world.oracle(q), rtol=1e-4, atol=1e-4)
    assert float(got.min()) > 0.5  # tokens whose score is 1 have most of the weight


@every("large", [1e-30, 1e-3, 6e4, 1e30])
def test_int8_pools_have_a_scale_per_token_and_head(isa: str, large: float) -> None:
    """Neighbouring tokens have very different magnitudes, and each has its own scale."""
    world = World([(1, 90), (40, 60)], pool=torch.int8, backend=NativeAttention)
    world.layer = replace(world.layer, scale=world.layer.scale / max(1.0, large))
    q, k, v = (tensor.clone() for tensor in world.inputs())
    k[::2] *= large
    v[::3] *= large
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch)).double()
    assert world._is_written(k, v)
    assert float((got - world.oracle(q)).abs().max()) < QUERY_ROUNDING * max(4.0, float(v.abs().max()))


@every("value", [0.0, 2.0**-24, 6e-8, 65504.0, 65519.9, 65520.0, math.inf, -math.inf, math.nan])
def test_float16_pools_are_rounded_to_nearest(isa: str, value: float) -> None:
    world = World([(1, 1)], pool=torch.float16, backend=NativeAttention)
    q, k, v = (tensor.clone() for tensor in world.inputs())
    v[:] = value
    v[..., 1::2] *= -1
    world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    at = world.slots(0, 0, 1)
    assert torch.equal(world.values()[at].nan_to_num(nan=3.0), v.half().nan_to_num(nan=3.0))


@every("rows", [[(1, 500), (1, 3)], [(300, 300)], [(270, 600), (1, 90)]])
@every(("window", "soft_cap"), [(50, None), (None, 10.0), (50, 10.0)])
@each_backend
def test_windows_and_soft_caps(
    rows: list[tuple[int, int]], window: int | None, soft_cap: float | None, backend: Any
) -> None:
    assert World(rows, window=window, soft_cap=soft_cap, backend=backend).relative_error() <= 1


@every("rows", [[(1, 500), (1, 3)], [(300, 300)], [(270, 600), (1, 90)], [(1, 40), (5, 5)]])
@every(("window", "soft_cap"), [(None, None), (50, None), (None, 10.0)])
@every("dtype", [torch.float32, torch.bfloat16])
def test_alibi(dtype: torch.dtype, window: int | None, soft_cap: float | None, rows: list[tuple[int, int]]) -> None:
    """Nine heads share three KV heads, and each has a slope of its own. Native kernels refuse such layers."""
    slopes = tuple(2.0**-head for head in range(9))
    world = World(rows, dtype=dtype, window=window, soft_cap=soft_cap, alibi=slopes)
    assert world.relative_error() <= 1
    assert world.backend.supports(world.layer) is None


@every("rows", [[(1, 500), (1, 3), (1, 129)], [(300, 300)], [(270, 600), (1, 90)], [(1, 128), (3, 130)]])
@every("chunk", [1, 64, 1000])
@every("window", [None, 50])
@each_backend
def test_chunks(window: int | None, chunk: int, rows: list[tuple[int, int]], backend: Any) -> None:
    """Queries at the borders of chunks, and blocks of queries that span several."""
    world = World(rows, window=window, chunk=chunk, backend=backend)
    assert world.relative_error() <= 1
    assert world.backend.supports(world.layer) is None


@every("rows", [[(1, 500), (1, 3)], [(300, 300)], [(270, 600), (1, 90), (1, 1)]])
@every("options", [{}, {"window": 50, "soft_cap": 10.0}, {"soft_cap": 10.0, "sinks": SINKS}])
@each_backend
def test_temperature(options: dict[str, Any], rows: list[tuple[int, int]], backend: Any) -> None:
    """Scores of queries beyond a position are larger, after the soft cap; sinks are not."""
    world = World(rows, temperature_from=128, backend=backend, **options)
    assert world.relative_error() <= 1
    assert world.backend.supports(world.layer) is None
    world.layer = replace(world.layer, temperature_from=None)
    assert world.relative_error() <= 1  # of another layer, without it


@every("rows", [[(1, 500), (1, 3)], [(300, 300)], [(270, 600), (1, 90), (1, 1)]])
@every("options", [{}, {"window": 50}, {"chunk": 64}, {"soft_cap": 10.0}, {"dtype": torch.bfloat16}])
@each_backend
def test_sinks(options: dict[str, Any], rows: list[tuple[int, int]], backend: Any) -> None:
    world = World(rows, sinks=SINKS, backend=backend, **options)
    assert world.relative_error() <= 1
    assert world.backend.supports(world.layer) is None


@every("sinks", [None, SINKS])
@every("chunk", [None, 1100])
@every("pool", [None, *POOLS])
def test_sinks_of_divided_rows_count_once_on_every_instruction_set(
    isa: str, pool: torch.dtype | None, chunk: int | None, sinks: tuple[float, ...] | None
) -> None:
    """Rows of one query that are divided, also within a chunk, and rows of several tiles of queries."""
    rows = [(1, 3000), (1, 1024), (1, 2200), (70, 100)]
    assert World(rows, pool=pool, chunk=chunk, sinks=sinks, backend=NativeAttention).relative_error() <= 1


@native
def test_native_kernels_refuse_alibi() -> None:
    world = World([(1, 1)], backend=NativeAttention)
    reason = world.backend.supports(replace(world.layer, alibi=(0.5,) * 9))
    assert reason == "it does not support linear position biases (ALiBi)"


@native
@every("window", [None, 1500])
@every("pool", [None, *POOLS])
@every("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_are_split_and_merged(dtype: torch.dtype, pool: torch.dtype | None, window: int | None) -> None:
    rows = [(1, 3000), (1, 1024), (1, 1025), (2, 2500)]
    assert World(rows, dtype=dtype, pool=pool, window=window, backend=NativeAttention).relative_error() <= 1


@every("rows", [[(1, 50)], [(4, 50)]])
def test_contiguous_pages_are_read_in_place(rows: list[tuple[int, int]]) -> None:
    world = World(rows)
    world.table[0, :4] = torch.arange(1, 5)
    plain = world.keys().clone(), world.values().clone()
    for buffer in plain:
        buffer[1:5] = world.random(4, *buffer.shape[1:])
    world.write(0, *plain)
    assert world.relative_error() <= 1


@each_backend
def test_layers_of_different_windows_share_one_plan(backend: Any) -> None:
    world = World([(1, 100), (4, 60)], layers=2, backend=backend)
    plan = world.backend.plan(world.batch)
    for index, window in ((0, None), (1, 8), (0, None)):
        world.layer = replace(world.layer, index=index, window=window)
        q, k, v = world.inputs()
        got = world.backend.forward(world.layer, q, k, v, plan)
        torch.testing.assert_close(got.double(), world.oracle(q), rtol=2e-5, atol=2e-5)


@each_backend
def test_a_row_does_not_depend_on_its_neighbours(backend: Any) -> None:
    world = World([(1, 40), (1, 700), (1, 350), (1, 41)], backend=backend)
    q, k, v = world.inputs()
    together = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    for row, (_, length) in enumerate(world.rows):
        one, single = slice(row, row + 1), AttentionBatch([1], [length], world.table[row : row + 1])
        alone = world.backend.forward(world.layer, q[one], k[one], v[one], world.backend.plan(single))
        torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-6)


# (rows, number of first pages that each row has in common with the previous row)
PREFIXES = {
    "all of one": ([(1, 90 + row) for row in range(16)], [0, *[5] * 15]),
    "longer than a split": ([(1, 1020), (1, 1060), (1, 1023), (1, 1030), (1, 2100)], [0, 62, 62, 60, 63]),
    "two groups": ([(1, 100), (1, 130), (1, 70), (1, 200), (1, 201)], [0, 6, 0, 4, 12]),
    "shorter and shorter": ([(1, 400), (1, 400), (1, 400), (1, 400), (1, 400)], [0, 24, 12, 6, 2]),
    "with prompts between": ([(1, 200), (7, 200), (1, 200), (1, 200), (30, 210)], [0, 11, 11, 12, 11]),
    "one page, and partial pages": ([(1, 17), (1, 40), (1, 16), (1, 1)], [0, 1, 0, 0]),
}


@every("sinks", [None, SINKS])
@every("pool", [None, *POOLS])
@every("dtype", [torch.float32, torch.bfloat16])
@every("heads", HEADS.values())
@every(("rows", "shared"), PREFIXES.values())
def test_rows_that_share_a_prefix_have_the_same_results_as_alone(
    isa: str,
    rows: list[tuple[int, int]],
    shared: list[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    pool: torch.dtype | None,
    sinks: tuple[float, ...] | None,
) -> None:
    world = World(rows, heads=heads, dtype=dtype, pool=pool, sinks=sinks, backend=NativeAttention)
    for row, pages in enumerate(shared):
        world.table[row, :pages] = world.table[row - 1, :pages]
    assert world.relative_error() <= 1
    q, k, v = world.inputs()
    together = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    begin = 0
    for row, (queries, length) in enumerate(rows):
        tokens = slice(begin, begin + queries)
        begin += queries
        alone = AttentionBatch([queries], [length], world.table[row : row + 1])
        got = world.backend.forward(world.layer, q[tokens], k[tokens], v[tokens], world.backend.plan(alone))
        assert torch.equal(got, together[tokens]), row


@every("heads", [*HEADS.values(), (8, 2), (16, 2), (16, 1)])
@every("groups", [16, 4, 2, 1])
def test_a_shared_prefix_is_read_once_per_tile_of_rows(isa: str, groups: int, heads: tuple[int, int]) -> None:
    """Sixteen rows of 1,000 tokens, which begin in turn with the 62 pages of one of `groups` prefixes."""
    rows, length, pages, kv_tile, block = 16, 1000, 62, 64, 16
    world = World([(1, length)] * rows, heads=heads, backend=NativeAttention)
    for row in range(groups, rows):
        world.table[row, :pages] = world.table[row - groups, :pages]
    plan = world.backend.plan(world.batch)
    world.backend.forward(world.layer, *world.inputs(), plan)
    group = heads[0] // heads[1]
    together = max(1, (24 if group in (3, 6) else 32) // group)
    times = groups * math.ceil(rows // groups / together)
    shared = pages * block // kv_tile * (kv_tile // block) if together > 1 and groups < rows else 0
    own_blocks = math.ceil(length / block) - shared
    assert LOADED.library is not None
    assert LOADED.library.srv_attention_blocks(plan.address) == heads[1] * (times * shared + rows * own_blocks)


@pytest.mark.parametrize(
    ("backend", "pool"),
    [(TorchNativeAttention, None), *(pytest.param(NativeAttention, pool, marks=native) for pool in (None, *POOLS))],
)
def test_nan_affects_only_its_row(backend: Any, pool: torch.dtype | None) -> None:
    world = World([(1, 40), (1, 45), (6, 20)], pool=pool, backend=backend)
    q, k, v = world.inputs()
    k[1] = v[1] = torch.nan
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got[1].isnan().all()
    assert got[[0, *range(2, 8)]].isfinite().all()


@every("count", [1, 63, 64, 65])
@every("what", ["keys", "keys and values"])
@every("pool", [None, *POOLS])
def test_nan_in_the_first_tokens_affects_all_later_tokens_of_the_row(
    isa: str, pool: torch.dtype | None, what: str, count: int
) -> None:
    world = World([(100, 100), (1, 30)], pool=pool, backend=NativeAttention)
    q, k, v = (tensor.clone() for tensor in world.inputs())
    k[:count] = torch.nan
    if what != "keys":
        v[:count] = torch.nan
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got[:100].isnan().all()
    assert got[100].isfinite().all()


@native
@every("other", range(3))
@every("pool", [torch.float32, torch.int8])
def test_native_attention_refuses_mixed_dtypes(pool: torch.dtype, other: int) -> None:
    world = World([(1, 20)], pool=pool, backend=NativeAttention)
    inputs = list(world.inputs())
    inputs[other] = inputs[other].to(torch.float16)
    with pytest.raises(InternalError, match=r"torch\.float16.*over a pool of"):
        world.backend.forward(world.layer, *inputs, world.backend.plan(world.batch))


def test_pool_of_another_dtype_than_the_model() -> None:
    world = World([(1, 40), (5, 30)], dtype=torch.bfloat16)
    q, k, v = (tensor.float() for tensor in world.inputs())
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), world.oracle(q), rtol=2e-2, atol=2e-2)


@each_backend
def test_a_missing_pool_is_refused(backend: Any) -> None:
    with pytest.raises(InternalError, match="without a KV pool"):
        backend(BackendContext(cast(Any, None), torch.device("cpu"), None, 1, HOST_TRANSFERS))
