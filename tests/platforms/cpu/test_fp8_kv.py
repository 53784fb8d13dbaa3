"""KV pools of 8-bit floats on the CPU platform, compared with float64 attention over decoded codes.

The oracle knows the formats from their definition alone: a table of all codes, in which a number's neighbour is
searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from every import every
from host_transfers import HOST_TRANSFERS
from torch import Tensor

from srv.dtypes import KVScales
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv.platform.pools import pool_of
from srv.specs import FullAttention, KVLayout
from srv_cpu.attention import TorchNativeAttention
from srv_cpu.packed import ORDER, tensors
from srv_kernels import oracles
from srv_kernels.cpu import build
from srv_kernels.cpu.library import load

LOADED = load()
NativeAttention: Any = None
if LOADED.library is not None:
    from srv_cpu.native_attention import NativeAttention
FORMATS = {
    torch.float8_e4m3fn: (4, 3, 448.0),
    torch.float8_e5m2: (5, 2, 57344.0),
}  # exponent and fraction bits, largest
SCALES = (KVScales(0.25, 3.0), KVScales(7.0, 0.0625))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PATHS = ([(1, 1)], [(1, 33), (1, 5), (1, 300)], [(40, 40)], [(70, 200), (1, 9)], [(1, 4), (5, 9), (1, 20)])


@pytest.fixture(params=("torch_native", *build.isas()))
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each class of attention; the native one on every instruction set."""
    if request.param == "torch_native":
        yield TorchNativeAttention
        return
    if LOADED.library is None:
        pytest.skip(f"no native kernels here: {LOADED.reason}")
    best = LOADED.isa
    if not LOADED.library.srv_choose_isa(request.param.encode()):
        pytest.skip(f"this processor, or this build, has no {request.param}")
    yield NativeAttention
    LOADED.library.srv_choose_isa(best.encode())


def numbers(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The finite numbers above or equal to 0 by their codes."""
    exponents, fractions, largest = FORMATS[dtype]
    bias, values = (1 << exponents - 1) - 1, []
    for code in range(128):
        exponent, fraction = code >> fractions, code & (1 << fractions) - 1
        whole = fraction / (1 << fractions) + (exponent > 0)
        values.append(whole * 2.0 ** (max(exponent, 1) - bias))
    return np.array([number for number in values if number <= largest])


def codes_of(x: Tensor, dtype: torch.dtype, scale: float) -> npt.NDArray[np.int64]:
    """The code of each x / scale, which is rounded to float32 first; -1 for NaN, whose code has no single value."""
    table = numbers(dtype)
    scaled = (x.float().numpy() / np.float32(scale)).astype(np.float64)
    magnitude = np.minimum(np.abs(scaled), table[-1])
    upper = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    lower = np.maximum(upper - 1, 0)
    down, up = magnitude - table[lower], table[upper] - magnitude
    nearest = np.where((down < up) | ((down == up) & (lower % 2 == 0)), lower, upper)
    return np.where(np.isnan(scaled), -1, nearest + np.where(np.signbit(scaled), 128, 0))


def decoded(codes: npt.NDArray[np.int64], dtype: torch.dtype, scale: float) -> Tensor:
    table = numbers(dtype)
    plain = np.where(codes >= 128, -1.0, 1.0) * table[codes % 128]
    return torch.from_numpy(np.where(codes < 0, math.nan, plain) * scale)


class World:
    """Layers with scales, whose rows get all their tokens but those of the last step in steps before it."""

    def __init__(self, rows: list[tuple[int, int]], pool: torch.dtype, backend: Any, heads: tuple[int, int], dim: int):
        self.rows, self.pool, self.heads, self.dim = rows, pool, heads, dim
        self.generator = torch.Generator().manual_seed(len(rows))
        pages = [-(-length // 16) for _, length in rows]
        free = (torch.randperm(sum(pages), generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(rows), max(pages) + 1, dtype=torch.int32)
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        packed = backend is NativeAttention
        group = FullAttention(tuple(range(len(SCALES))), heads[1], dim, dim)
        name = str(pool).removeprefix("torch.")
        layout = KVLayout(group, 16, name, ORDER if packed else "page_token_head", SCALES)
        shapes = tensors(layout, sum(pages)) if packed else layout.plain_tensors(sum(pages))
        self.kv: KVBuffers = pool_of(layout, shapes, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        context = BackendContext(cast(Any, None), torch.device("cpu"), self.kv, len(rows), HOST_TRANSFERS)
        self.backend = backend(context)

    def run(self, dtype: torch.dtype, size: float = 3.0, **traits: Any) -> float:
        """The largest error of the last step's result, divided by the tolerance."""
        worst = 0.0
        for index, scales in enumerate(SCALES):
            layer = AttentionLayer(index, *self.heads, self.dim, self.dim**-0.5, **traits)
            lengths = [length for _, length in self.rows]
            shape = (sum(lengths), self.heads[1], self.dim)
            keys, values = (torch.randn(shape, generator=self.generator).mul(size).to(dtype) for _ in range(2))
            stored = [
                decoded(codes_of(x, self.pool, s), self.pool, s) for x, s in zip((keys, values), scales, strict=True)
            ]
            begins = np.cumsum([0, *lengths])
            before = [(row, length - queries) for row, (queries, length) in enumerate(self.rows) if length > queries]
            if before:
                self.step(layer, keys, values, [(row, 0, count, begins[row]) for row, count in before], dtype)
            parts = [(row, n - queries, n, begins[row]) for row, (queries, n) in enumerate(self.rows)]
            q, got = self.step(layer, keys, values, parts, dtype)
            want = self.reference(layer, q, *stored)
            error = (got.double() - want).abs() / (TOLERANCE[dtype] * (1 + want.abs()) * max(1.0, size))
            worst = max(worst, float(error.nan_to_num(nan=math.inf).max()))
        return worst

    def step(
        self,
        layer: AttentionLayer,
        keys: Tensor,
        values: Tensor,
        parts: list[tuple[int, int, int, int]],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute tokens [begin, end) of rows, given with where their keys begin; queries, and the result."""
        chosen = torch.cat([torch.arange(base + begin, base + end) for _, begin, end, base in parts])
        rows = [row for row, *_ in parts]
        counts, ends = [end - begin for _, begin, end, _ in parts], [end for _, _, end, _ in parts]
        batch = AttentionBatch(counts, ends, self.table[rows])
        q = torch.randn(len(chosen), self.heads[0], self.dim, generator=self.generator).to(dtype)
        return q, self.backend.forward(layer, q, keys[chosen], values[chosen], self.backend.plan(batch))

    def reference(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows are pages of the oracle's pool, of which each is as long as the longest row."""
        longest = max(length for _, length in self.rows)
        pool = torch.zeros(2, len(self.rows), longest, self.heads[1], self.dim, dtype=torch.float64)
        begin = 0
        for row, (_, length) in enumerate(self.rows):
            pool[0, row, :length], pool[1, row, :length] = keys[begin : begin + length], values[begin : begin + length]
            begin += length
        table = torch.arange(len(self.rows), dtype=torch.int32)[:, None]
        counts, lengths = zip(*self.rows, strict=True)
        return oracles.paged_attention(
            q, pool[0], pool[1], table, counts, lengths, layer.scale, layer.window, layer.soft_cap
        )


@every("rows", PATHS)
@every("heads", [(9, 3), (4, 4)])
@every("pool", FORMATS)
@every("dtype", [torch.float32, torch.bfloat16])
def test_results_with_scales_agree_with_float64(
    backend: Any, rows: list[tuple[int, int]], heads: tuple[int, int], pool: torch.dtype, dtype: torch.dtype
) -> None:
    assert World(rows, pool, backend, heads, 64).run(dtype) <= 1


@every("pool", FORMATS)
@every("traits", [{"window": 7}, {"soft_cap": 5.0}, {"window": 40, "soft_cap": 5.0}])
def test_windows_and_soft_caps(backend: Any, pool: torch.dtype, traits: dict[str, Any]) -> None:
    assert World([(1, 90), (33, 60)], pool, backend, (4, 2), 80).run(torch.float32, 1.0, **traits) <= 4


@every("pool", FORMATS)
def test_float16_with_torch(pool: torch.dtype) -> None:
    assert World([(1, 90), (33, 60)], pool, TorchNativeAttention, (4, 2), 64).run(torch.float16) <= 1


@every("pool", FORMATS)
def test_sinks(backend: Any, pool: torch.dtype) -> None:
    world = World([(1, 5)], pool, backend, (2, 1), 16)
    layer = AttentionLayer(0, 2, 1, 16, 0.25, sinks=True, sink_scores=(50.0, 50.0))
    ones = torch.ones(5, 1, 16)
    _, got = world.step(layer, ones, ones, [(0, 0, 5, 0)], torch.float32)
    assert float(got.abs().max()) < 1e-6  # the sink has all the weight, and no value


@every("pool", FORMATS)
def test_every_code_is_read_and_every_number_rounded(backend: Any, pool: torch.dtype) -> None:
    """One token attends to itself alone, so that its value is the result: codes, ties, the range's ends and beyond."""
    table = numbers(pool)
    between = (table[1:] + table[:-1]) / 2  # ties
    near = [np.nextafter(between.astype(np.float32), np.float32(end)) for end in (0, math.inf)]
    inputs = np.concatenate([table, between, *near, [table[-1] * 1.01, 1e30, math.inf, 1e-30, table[1] / 2]])
    inputs = np.concatenate([inputs, -inputs]).astype(np.float32)
    x = torch.from_numpy(np.pad(inputs, (0, -len(inputs) % 16))).view(-1, 1, 16)
    world = World([(1, 1)] * len(x), pool, backend, (1, 1), 16)
    for index, scales in enumerate(SCALES):
        scaled = x * scales.value
        layer = AttentionLayer(index, 1, 1, 16, 0.25)
        parts = [(row, 0, 1, row) for row in range(len(x))]
        _, got = world.step(layer, torch.zeros_like(x), scaled, parts, torch.float32)
        codes = codes_of(scaled, pool, scales.value)
        torch.testing.assert_close(got.double(), decoded(codes, pool, scales.value), rtol=1e-6, atol=0)


@every("pool", FORMATS)
@every("part", ["key", "value"])
def test_nan_stays_nan_and_is_hidden_by_masks(backend: Any, pool: torch.dtype, part: str) -> None:
    world = World([(1, 40)], pool, backend, (1, 1), 16)
    keys, values = torch.ones(40, 1, 16), torch.ones(40, 1, 16)
    (keys if part == "key" else values)[7] = math.nan
    layer, windowed = AttentionLayer(0, 1, 1, 16, 0.25), AttentionLayer(1, 1, 1, 16, 0.25, window=5)
    for attention in (layer, windowed):
        world.step(attention, keys, values, [(0, 0, 39, 0)], torch.float32)
    assert world.step(layer, keys, values, [(0, 39, 40, 0)], torch.float32)[1].isnan().all()
    assert world.step(windowed, keys, values, [(0, 39, 40, 0)], torch.float32)[1].isfinite().all()
