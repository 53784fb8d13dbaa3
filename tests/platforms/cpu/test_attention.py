"""The CPU platform's attention backend against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv.specs import CacheGroup, KVLayout
from srv_cpu.attention import TorchNativeAttention
from srv_cpu.packed import INTERLEAVE, ORDER, shapes
from srv_kernels import oracles
from srv_kernels.cpu import build
from srv_kernels.cpu.library import load

LOADED = load()
NO_KERNELS = f"no native kernels here: {LOADED.reason}"
native = pytest.mark.skipif(LOADED.library is None, reason=NO_KERNELS)
NativeAttention: Any = None
if LOADED.library is not None:
    from srv_cpu.native_attention import NativeAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
POOLS = (torch.float16, torch.int8)  # of the native kernels, beside that of the queries' own type
# Over int8, 512 columns of queries and 64 weights are in units of 1/32,767 of their largest: errors of scores have a
# spread of 3e-5 and are seen up to five times that far out, times how far values lie apart.
QUERY_ROUNDING = 4e-4
each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(TorchNativeAttention, id="torch_native"), pytest.param(NativeAttention, id="native", marks=native)],
)
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
        pool: torch.dtype | None = None,
        seed: int = 0,
        window: int | None = None,
        soft_cap: float | None = None,
        layers: int = 1,
        backend: Any = TorchNativeAttention,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.page_size, self.dtype, self.pool = rows, page_size, dtype, pool or dtype
        self.layer = AttentionLayer(0, heads[0], heads[1], dim, dim**-0.5, window, soft_cap)
        counts = [-(-length // page_size) for _, length in rows]
        pages = sum(counts) + 3
        ids = (torch.randperm(pages, generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(rows), max(counts) + 2, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        self.packed = backend is NativeAttention
        plain = (pages + 1, page_size, heads[1], dim)
        group = CacheGroup("full", tuple(range(layers)), heads[1], dim, dim)
        order = ORDER if self.packed else "page_token_head"
        layout = KVLayout(group, page_size, str(self.pool).removeprefix("torch."), order)
        key_shape, value_shape = shapes(layout, pages + 1) if self.packed else (plain, plain)

        def buffers(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(torch.zeros(shape, dtype=self.pool) for _ in range(layers))

        self.kv = KVBuffers(layout, buffers(key_shape), buffers(value_shape))
        nowhere = torch.full(plain, torch.nan)
        for each in range(layers):
            self.write(each, nowhere, nowhere)
        self.backend = backend(BackendContext(cast(Any, None), torch.device("cpu"), self.kv, len(rows)))
        self._write_past(layers)

    def keys(self, layer: int = 0) -> torch.Tensor:
        """The pool's keys, [pages, page_size, kv_heads, dim]; a copy where the pool has another order."""
        if not self.packed:
            return self.kv.keys[layer]
        numbers, steps = self._taken_apart(self.kv.keys[layer])
        together = self._together
        numbers = numbers.view(*numbers.shape[:3], -1, 16, together)  # [pages, heads, blocks, dim / n, 16, n]
        plain = numbers.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)
        return plain if steps is None else plain * steps.permute(0, 2, 3, 1).flatten(1, 2)[..., None]

    def values(self, layer: int = 0) -> torch.Tensor:
        if not self.packed:
            return self.kv.values[layer]
        numbers, steps = self._taken_apart(self.kv.values[layer])
        together = self._together
        numbers = numbers.view(
            *numbers.shape[:3], 16 // together, -1, together
        )  # [pages, heads, blocks, 16 / n, dim, n]
        plain = numbers.permute(0, 2, 3, 5, 1, 4).flatten(1, 3)
        return plain if steps is None else plain * steps.permute(0, 2, 3, 1).flatten(1, 2)[..., None]

    @property
    def _together(self) -> int:
        return INTERLEAVE[self.kv.layout.dtype]

    def _taken_apart(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers [pages, heads, blocks, 16 dim]; of int8, what a token's step is worth [pages, heads, blocks, 16]."""
        flat = buffer.flatten(3)
        if self.pool != torch.int8:
            return flat, None
        return flat[..., :-64], flat[..., -64:].contiguous().view(torch.float32)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the whole pool of a layer from tensors of the plain order [pages, page_size, heads, dim]."""
        for buffer, plain, are_keys in ((self.kv.keys[layer], keys, True), (self.kv.values[layer], values, False)):
            if not self.packed:
                buffer.copy_(plain)
                continue
            numbers, steps = plain, None
            if self.pool == torch.int8:
                steps = plain.float().abs().amax(-1) / 127  # [pages, page_size, heads]
                numbers = (plain / steps[..., None]).nan_to_num().round()
            n, (pages, size, heads, dim) = self._together, plain.shape
            if are_keys:
                ordered = numbers.view(pages, size // 16, 16, heads, dim // n, n).permute(0, 3, 1, 4, 2, 5)
            else:
                ordered = numbers.view(pages, size // 16, 16 // n, n, heads, dim).permute(0, 4, 1, 2, 5, 3)
            if steps is None:
                buffer.copy_(ordered)
                continue
            buffer[..., :-64].copy_(ordered.flatten(3))
            worth = steps.view(pages, size // 16, 16, heads).permute(0, 3, 1, 2).contiguous()
            buffer[..., -64:].copy_(worth.view(torch.int8).flatten(3))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def slots(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(begin, end)
        return self.table[row, positions // self.page_size].long(), positions % self.page_size

    def _write_past(self, layers: int) -> None:
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
            self.keys(at),
            self.values(at),
            self.table,
            batch.query_lens,
            batch.kv_lens,
            layer.scale,
            layer.window,
            layer.soft_cap,
        )

    def worst(self) -> float:
        """The largest error of one forward pass, in multiples of what the dtype allows; above 1 is wrong.

        Infinite where k and v are not in the pool where the pages say, or the output has another shape or dtype.
        """
        q, k, v = self.inputs()
        got = self.backend.forward(self.layer, q, k, v, self.backend.plan(self.batch))
        if got.shape != q.shape or got.dtype != q.dtype or not self._is_written(k, v):
            return math.inf
        tolerance = TOLERANCE[self.dtype] + (QUERY_ROUNDING if self.pool == torch.int8 else 0)
        tolerance *= 4 if self.layer.soft_cap else 1
        wanted = self.oracle(q)
        errors = (got.double() - wanted).abs() / (tolerance * (1 + wanted.abs()))
        return float(errors.nan_to_num(nan=math.inf).max())

    def _is_written(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        begin, keys, values = 0, self.keys(), self.values()
        for row, (queries, length) in enumerate(self.rows):
            at, new = self.slots(row, length - queries, length), slice(begin, begin + queries)
            if not self._is_kept(keys[at], k[new]) or not self._is_kept(values[at], v[new]):
                return False
            begin += queries
        return True

    def _is_kept(self, kept: torch.Tensor, given: torch.Tensor) -> bool:
        """In the pool's type, rounded to the nearest number that it has there."""
        if self.pool != torch.int8:
            return torch.equal(kept, given.to(self.pool))
        steps = given.float().abs().amax(-1, keepdim=True) / 127
        return bool(((kept - given.float()).abs() <= steps * 0.5001).all())


@pytest.fixture(params=tuple(build.isas()))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels of one instruction set, each with cuts of its own, and the best again afterwards."""
    if LOADED.library is None:
        pytest.skip(NO_KERNELS)
    best = LOADED.isa
    if not LOADED.library.srv_choose_isa(request.param.encode()):
        pytest.skip(f"this processor, or this build, has no {request.param}")
    yield request.param
    LOADED.library.srv_choose_isa(best.encode())


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
    "seed": st.integers(0, 99),
}


@settings(max_examples=60, deadline=None)
@given(page_size=st.sampled_from((16, 1, 128)), dtype=st.sampled_from(sorted(TOLERANCE, key=str)), **ANY)
def test_any_batch_agrees_with_dense_attention(rows: list[tuple[int, int]], **options: Any) -> None:
    assert World(rows, **options).worst() <= 1


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
    assert World(rows, backend=NativeAttention, **options).worst() <= 1


PATHS = (
    [(1, 1)],  # first token
    [(1, 33)] * 5,  # equal lengths
    [(1, 5), (1, 1000), (1, 17), (1, 900)],  # lengths far apart
    [(8, 8)],  # fresh prompt
    [(300, 300), (1, 40)],  # prompt of several blocks
    [(300, 700)],  # blocks behind a prefix
    [(1, 4), (5, 9), (1, 20), (3, 3)],  # mixed
)


@every("heads", HEADS.values())
@every("dtype", TOLERANCE)
@every("rows", PATHS)
@each_backend
def test_shapes_that_take_each_path(
    rows: list[tuple[int, int]], dtype: torch.dtype, heads: tuple[int, int], backend: Any
) -> None:
    if backend is NativeAttention and dtype == torch.float16:
        return  # refused: see below
    assert World(rows, heads=heads, dtype=dtype, backend=backend).worst() <= 1


@every("heads", HEADS.values())
@every("pool", POOLS)
@every("dtype", [torch.float32, torch.bfloat16])
@every("rows", PATHS)
def test_native_pools_of_other_types(
    isa: str, rows: list[tuple[int, int]], dtype: torch.dtype, pool: torch.dtype, heads: tuple[int, int]
) -> None:
    assert World(rows, heads=heads, dtype=dtype, pool=pool, backend=NativeAttention).worst() <= 1


@every("pool", POOLS)
def test_the_largest_heads_and_inputs_stay_exact_in_32_bits(isa: str, pool: torch.dtype) -> None:
    """512 columns of equal magnitude are the most that a sum of products must hold; weights of 64 values, the other."""
    world = World([(1, 150), (70, 200)], heads=(2, 1), dim=512, pool=pool, backend=NativeAttention)
    # Scores are 1 and -1: a sum that turned over would change weights.
    world.layer = replace(world.layer, scale=1 / 512)
    signs = torch.tensor([1.0, -1.0])

    def alternating(tokens: int, *shape: int) -> torch.Tensor:
        return signs.repeat(tokens // 2 + 1)[:tokens].view(tokens, *[1] * len(shape)).expand(tokens, *shape)

    world.random = alternating  # type: ignore[assignment, method-assign]
    world._write_past(1)
    queries = sum(count for count, _ in world.rows)
    q, k = torch.ones(queries, 2, 512), alternating(queries, 1, 512)
    got = world.backend.forward(world.layer, q, k, k, world.backend.plan(world.batch))
    torch.testing.assert_close(got.double(), world.oracle(q), rtol=1e-4, atol=1e-4)
    assert float(got.min()) > 0.5  # tokens of which the key fits the query have most of the weight


@every("large", [1e-30, 1e-3, 6e4, 1e30])
def test_bytes_are_scaled_by_each_token_and_head(isa: str, large: float) -> None:
    """Neighbouring tokens of magnitudes far apart, of which each keeps steps of its own."""
    world = World([(1, 90), (40, 60)], pool=torch.int8, backend=NativeAttention)
    world.layer = replace(world.layer, scale=world.layer.scale / max(1.0, large))
    q, k, v = (tensor.clone() for tensor in world.inputs())
    k[::2] *= large
    v[::3] *= large
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch)).double()
    assert world._is_written(k, v)
    assert float((got - world.oracle(q)).abs().max()) < QUERY_ROUNDING * max(4.0, float(v.abs().max()))


@every("value", [0.0, 2.0**-24, 6e-8, 65504.0, 65519.9, 65520.0, math.inf, -math.inf, math.nan])
def test_halves_are_rounded_to_the_nearest(isa: str, value: float) -> None:
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
def test_windows_and_soft_caps_over_blocks(
    rows: list[tuple[int, int]], window: int | None, soft_cap: float | None, backend: Any
) -> None:
    assert World(rows, window=window, soft_cap=soft_cap, backend=backend).worst() <= 1


@native
@every("window", [None, 1500])
@every("pool", [None, *POOLS])
@every("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_are_read_in_parts_and_merged(
    dtype: torch.dtype, pool: torch.dtype | None, window: int | None
) -> None:
    rows = [(1, 3000), (1, 1024), (1, 1025), (2, 2500)]
    assert World(rows, dtype=dtype, pool=pool, window=window, backend=NativeAttention).worst() <= 1


@every("rows", [[(1, 50)], [(4, 50)]])
def test_pages_that_follow_one_another_are_read_in_place(rows: list[tuple[int, int]]) -> None:
    world = World(rows)
    world.table[0, :4] = torch.arange(1, 5)
    plain = world.keys().clone(), world.values().clone()
    for buffer in plain:
        buffer[1:5] = world.random(4, *buffer.shape[1:])
    world.write(0, *plain)
    assert world.worst() <= 1


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


# (rows, pages that neighbours have of the row before them)
PREFIXES = {
    "all of one": ([(1, 90 + row) for row in range(16)], [0, *[5] * 15]),
    "over a part's end": ([(1, 1020), (1, 1060), (1, 1023), (1, 1030), (1, 2100)], [0, 62, 62, 60, 63]),
    "two groups": ([(1, 100), (1, 130), (1, 70), (1, 200), (1, 201)], [0, 6, 0, 4, 12]),
    "ever less": ([(1, 400), (1, 400), (1, 400), (1, 400), (1, 400)], [0, 24, 12, 6, 2]),
    "with prompts between": ([(1, 200), (7, 200), (1, 200), (1, 200), (30, 210)], [0, 11, 11, 12, 11]),
    "one page, and none whole": ([(1, 17), (1, 40), (1, 16), (1, 1)], [0, 1, 0, 0]),
}


@every("pool", [None, *POOLS])
@every("dtype", [torch.float32, torch.bfloat16])
@every("heads", HEADS.values())
@every(("rows", "shared"), PREFIXES.values())
def test_rows_that_begin_with_the_same_pages_go_together_and_each_is_as_if_alone(
    isa: str,
    rows: list[tuple[int, int]],
    shared: list[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    pool: torch.dtype | None,
) -> None:
    world = World(rows, heads=heads, dtype=dtype, pool=pool, backend=NativeAttention)
    for row, pages in enumerate(shared):
        world.table[row, :pages] = world.table[row - 1, :pages]
    assert world.worst() <= 1
    q, k, v = world.inputs()
    together = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    begin = 0
    for row, (queries, length) in enumerate(rows):
        of = slice(begin, begin + queries)
        begin += queries
        alone = AttentionBatch([queries], [length], world.table[row : row + 1])
        got = world.backend.forward(world.layer, q[of], k[of], v[of], world.backend.plan(alone))
        assert torch.equal(got, together[of]), row


@every("heads", [*HEADS.values(), (8, 2), (16, 2), (16, 1)])
@every("groups", [16, 4, 2, 1])
def test_a_shared_prefix_is_read_once_for_as_many_rows_as_go_together(
    isa: str, groups: int, heads: tuple[int, int]
) -> None:
    """Sixteen rows of 1,000 tokens, which begin in turn with one of these groups' 62 pages."""
    rows, length, pages, stretch, block = 16, 1000, 62, 64, 16
    world = World([(1, length)] * rows, heads=heads, backend=NativeAttention)
    for row in range(groups, rows):
        world.table[row, :pages] = world.table[row - groups, :pages]
    plan = world.backend.plan(world.batch)
    world.backend.forward(world.layer, *world.inputs(), plan)
    group = heads[0] // heads[1]
    together = max(1, (24 if group in (3, 6) else 32) // group)
    times = groups * math.ceil(rows // groups / together)
    shared = pages * block // stretch * (stretch // block) if together > 1 and groups < rows else 0
    own = math.ceil(length / block) - shared
    assert LOADED.library is not None
    assert LOADED.library.srv_attention_blocks(plan.address) == heads[1] * (times * shared + rows * own)


@pytest.mark.parametrize(
    ("backend", "pool"),
    [(TorchNativeAttention, None), *(pytest.param(NativeAttention, pool, marks=native) for pool in (None, *POOLS))],
)
def test_nan_in_one_row_stays_in_it(backend: Any, pool: torch.dtype | None) -> None:
    world = World([(1, 40), (1, 45), (6, 20)], pool=pool, backend=backend)
    q, k, v = world.inputs()
    k[1] = v[1] = torch.nan
    got = world.backend.forward(world.layer, q, k, v, world.backend.plan(world.batch))
    assert got[1].isnan().all()
    assert got[[0, *range(2, 8)]].isfinite().all()


@every("count", [1, 63, 64, 65])
@every("what", ["keys", "keys and values"])
@every("pool", [None, *POOLS])
def test_nan_at_a_row_s_beginning_is_seen_by_all_that_follows(
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
def test_native_attention_refuses_types_that_do_not_go_together(pool: torch.dtype, other: int) -> None:
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
def test_without_a_pool_it_refuses(backend: Any) -> None:
    with pytest.raises(InternalError, match="without a KV pool"):
        backend(BackendContext(cast(Any, None), torch.device("cpu"), None, 1))
