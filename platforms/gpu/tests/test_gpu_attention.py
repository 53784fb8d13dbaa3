"""Each attention backend against dense attention on the host: mixed steps, windows, device lengths, captured steps."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_naive import NaiveAttention
from conftest import context
from torch import Tensor

from srv.dtypes import KVScales
from srv.platform.facts import BackendSpec, Requires
from srv.platform.interface import AttentionBatch, AttentionLayer, GraphKey
from srv.platform.manifest import Manifest
from srv.platform.pools import plain_pool
from srv.testing.conformance.bench import round_trip_float8
from srv_gpu import triton_ops
from srv_gpu.facts import NUM_KV_SPLITS, SPLIT_TILE_SIZE
from srv_gpu.graphs import GpuGraphs
from srv_gpu.platform import GpuPlatform
from srv_kernels.triton.attention_tuning import SPLIT_TOKENS

HEADS, KV_HEADS, COLUMNS = 8, 2, 6
FIXED = {"flashinfer": ("bfloat16", 64), "aiter": ("bfloat16", 128)}  # of kernels for 16-bit dtypes and some heads
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SINKS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 40.0)  # of each head


class Unset(SimpleNamespace):
    """The context of a rule if the user set nothing."""

    def __getitem__(self, argument: str) -> None:
        return None


def specs(manifest: Manifest, variant: str) -> list[BackendSpec]:
    """Those that are called on this device."""
    about: Any = Unset(device=manifest.facts.profiles[variant], model=None)
    return [spec for spec in manifest.facts.backends["attention"] if isinstance(spec.check(about), Requires)]


class World:
    """A backend over a pool, and dense attention over a pool on the host. Rows own pages in a shuffled order."""

    def __init__(
        self, platform: GpuPlatform, spec: BackendSpec, rows: int, pool: str | None = None, **arguments: Any
    ) -> None:
        self.dtype, self.dim = FIXED.get(spec.name, ("float32", 64))
        build = context(platform, dim=self.dim, dtype=pool or self.dtype, **arguments)
        assert build.kv is not None
        self.transfers, self.device = build.transfers, build.device
        self.backend = pkgutil.resolve_name(spec.target)(build)
        plain = replace(build.kv.layout, dtype=self.dtype, scales=())
        host: Any = SimpleNamespace(kv=plain_pool(plain, 40, torch.device("cpu")))
        self.reference = NaiveAttention(host)
        self.table = (torch.randperm(40)[: rows * COLUMNS] + 1).view(rows, COLUMNS).to(torch.int32)
        self.device_table = self.table.to(self.device)
        self.layer = AttentionLayer(0, HEADS, KV_HEADS, self.dim, self.dim**-0.5)

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v of so many tokens."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return (
            torch.randn(count, HEADS, self.dim).to(dtype),
            torch.randn(count, KV_HEADS, self.dim).to(dtype),
            torch.randn(count, KV_HEADS, self.dim).to(dtype),
        )

    def check(self, queries: Sequence[int], lengths: Sequence[int], layer: AttentionLayer | None = None) -> None:
        """One step of both."""
        used, new = layer or self.layer, self.rows(sum(queries))
        self.transfers.begin()
        metadata = self.backend.plan(AttentionBatch(queries, lengths, self.device_table[: len(queries)]))
        got = self.backend.forward(used, *(tensor.to(self.device) for tensor in new), metadata)
        self.compare(got, self.expected(queries, lengths, new, used))
        copies = self.transfers.end()
        copies.wait()
        copies.release()

    def expected(
        self,
        queries: Sequence[int],
        lengths: Sequence[int],
        new: tuple[Tensor, ...],
        layer: AttentionLayer | None = None,
    ) -> Tensor:
        q, k, v = new
        plan = self.reference.plan(AttentionBatch(queries, lengths, self.table[: len(queries)]))
        return self.reference.forward(layer or self.layer, q, k, v, plan)

    def compare(self, got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0, atol=TOLERANCE[self.dtype])


@pytest.fixture
def triton(platform: GpuPlatform, manifest: Manifest, variant: str) -> Callable[..., World]:
    """Makes a world of the backend triton: rows, then the pool's dtype and arguments of the server."""
    (spec,) = (spec for spec in specs(manifest, variant) if spec.name == "triton")
    return partial(World, platform, spec)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The most query tokens and the splits of each launch of `paged_decode`."""
    shapes: list[tuple[int, int]] = []
    launch = triton_ops.paged_decode

    def record(*arguments: Any) -> None:
        shapes.append((arguments[-1][0], arguments[-1][1]))
        launch(*arguments)

    monkeypatch.setattr(triton_ops, "paged_decode", record)
    return shapes


Worlds = Callable[[int], list[tuple[BackendSpec, World]]]


@pytest.fixture
def every_backend(platform: GpuPlatform, manifest: Manifest, variant: str) -> Worlds:
    return lambda rows: [(spec, World(platform, spec, rows)) for spec in specs(manifest, variant)]


def test_prompts_chunks_and_decode_rows_in_one_step(every_backend: Worlds) -> None:
    worlds = every_backend(4)
    assert {"torch_native", "triton"} <= {spec.name for spec, _ in worlds}
    for _, world in worlds:
        world.check([5, 16, 17, 40], [5, 16, 17, 40])
        world.check([1, 20, 1, 3], [6, 36, 18, 43])
        world.check([1, 1, 1, 1], [7, 37, 19, 44])


def test_windows_and_soft_caps_where_they_are_declared(every_backend: Worlds) -> None:
    for spec, world in every_backend(2):
        layer = replace(
            world.layer,
            window=20 if "window" in spec.traits else None,
            soft_cap=15.0 if "soft_cap" in spec.traits else None,
        )
        assert world.backend.supports(layer) is None
        world.check([30, 70], [30, 70], layer)
        world.check([1, 1], [31, 71], layer)
        if "window" not in spec.traits:
            assert "sliding window of 20 tokens" in world.backend.supports(replace(layer, window=20))


def test_alibi_where_it_is_declared(every_backend: Worlds) -> None:
    slopes = tuple(2.0**-head for head in range(HEADS))
    for spec, world in every_backend(2):
        layer = replace(world.layer, alibi=slopes)
        if "alibi" not in spec.traits:
            assert "linear position biases (ALiBi)" in world.backend.supports(layer)
            continue
        assert world.backend.supports(layer) is None
        world.check([30, 70], [30, 70], layer)
        world.check([1, 5], [31, 75], layer)


def test_lengths_that_exist_only_on_the_device(every_backend: Worlds) -> None:
    """The host knows upper bounds: here three tokens more than there are."""
    for spec, world in every_backend(2):
        if spec.lengths != "device":
            continue
        world.check([10, 33], [10, 33])
        new = world.rows(2)
        lengths = torch.tensor([11, 34], dtype=torch.int32, device=world.device)
        metadata = world.backend.plan(AttentionBatch([1, 1], [14, 37], world.device_table, lengths=lengths))
        got = world.backend.forward(world.layer, *(tensor.to(world.device) for tensor in new), metadata)
        world.compare(got, world.expected([1, 1], [11, 34], new))


def test_replays_read_lengths_and_pages_of_their_step(platform: GpuPlatform, every_backend: Worlds) -> None:
    """Of three rows, the last is padding at first. Steps are planned and replayed without a wait in between."""
    if platform.graphs is None:
        pytest.skip("the platform captures no steps")
    for spec, world in every_backend(3):
        if not spec.graphs:
            continue
        world.check([10, 33, 60], [10, 33, 60])
        if "sinks" in spec.traits:
            world.layer = replace(world.layer, sinks=True, sink_scores=SINKS)
        table = torch.zeros(3, COLUMNS, dtype=torch.int32, device=world.device)
        q, k, v = (torch.zeros_like(tensor, device=world.device) for tensor in world.rows(3))
        metadata = world.backend.plan(AttentionBatch([1] * 3, [1] * 3, table, graph=3))
        graphs = GpuGraphs(platform._accelerator)
        out = graphs.capture(GraphKey("decode", 3), partial(world.backend.forward, world.layer, q, k, v, metadata))
        got, want = [], []
        for lengths, pages in (([11, 34, 1], 2), ([12, 35, 61], 3), ([13, 36, 62], 3)):
            new = world.rows(3)
            for fixed, values in zip((q, k, v), new, strict=True):
                fixed.copy_(values)
            table[:pages].copy_(world.device_table[:pages])
            graphs.replay(GraphKey("decode", 3), [world.backend.plan(AttentionBatch([1] * 3, lengths, table, graph=3))])
            got.append(out[:pages].clone())
            want.append(world.expected([1] * pages, lengths[:pages], tuple(tensor[:pages] for tensor in new)))
        for one, other in zip(got, want, strict=True):
            world.compare(one, other)


def test_rows_with_drafts_are_decoded_beside_prompts(
    triton: Callable[..., World], decoded: list[tuple[int, int]]
) -> None:
    """Rows of up to eight query tokens; what a launch is compiled for is a power of two."""
    world = triton(4)
    world.check([5, 16, 17, 40], [5, 16, 17, 40])
    world.check([1, 3, 1, 6], [6, 19, 18, 46])
    world.check([1, 9, 2, 1], [7, 28, 20, 47])
    assert [queries for queries, _ in decoded] == [8, 8, 2]


def test_the_user_limits_the_splits_of_a_row(triton: Callable[..., World], decoded: list[tuple[int, int]]) -> None:
    """More splits than the default for such short rows, and fewer: results are equal, launches are not."""
    world = triton(2, **{SPLIT_TILE_SIZE: 64})
    world.check([90, 30], [90, 30])
    world.check([1, 1], [91, 31])
    for most, splits in ((None, 2), (1, 1)):
        backend = triton(2, **({} if most is None else {NUM_KV_SPLITS: most})).backend
        plan = backend._decode_plan(backend._heads(world.layer, 4), 2, 1, 2 * SPLIT_TOKENS)
        assert plan.splits == splits
    assert decoded == [(1, 2)]  # of 91 tokens; by default they would not be divided


def test_with_splits_of_one_size_a_row_does_not_depend_on_the_others(triton: Callable[..., World]) -> None:
    """To the last bit, alone and beside a longer row, for which there are more splits."""
    results = []
    for rows in (1, 3):
        torch.manual_seed(7)
        world = triton(3, **{SPLIT_TILE_SIZE: 64})
        prompt, new = world.rows(70), world.rows(1)
        lengths = [71, 94, 20][:rows]
        others = [world.rows(sum(lengths[1:]) - rows + 1), world.rows(rows - 1)] if rows > 1 else None
        for step, (inputs, queries) in enumerate(((prompt, [length - 1 for length in lengths]), (new, [1] * rows))):
            parts = (
                inputs if others is None else tuple(torch.cat(pair) for pair in zip(inputs, others[step], strict=True))
            )
            kv_lens = [length - 1 + step for length in lengths]
            metadata = world.backend.plan(AttentionBatch(queries, kv_lens, world.device_table[:rows]))
            got = world.backend.forward(world.layer, *(tensor.to(world.device) for tensor in parts), metadata)
        results.append(got[0].cpu())
    assert torch.equal(*results)


def test_a_pool_of_int8_has_a_scale_per_vector(triton: Callable[..., World]) -> None:
    """Vectors of very different magnitudes keep their precision; drafts, prompts and output read the same pool."""
    world = triton(3, pool="int8")
    for queries, lengths in (([20, 5, 40], [20, 5, 40]), ([1, 3, 17], [21, 8, 57])):
        q, k, v = world.rows(sum(queries))
        v = v * torch.logspace(-3, 1, len(v))[:, None, None]
        metadata = world.backend.plan(AttentionBatch(queries, lengths, world.device_table[:3]))
        got = world.backend.forward(world.layer, *(tensor.to(world.device) for tensor in (q, k, v)), metadata)
        want = world.expected(queries, lengths, (q, k, v))
        scale = want.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(got.cpu() / scale, want / scale, rtol=0, atol=0.04)


@pytest.mark.parametrize("name", ["triton", "torch_native"])
def test_a_pool_of_8_bit_floats_has_scales_per_layer(
    platform: GpuPlatform, manifest: Manifest, variant: str, name: str
) -> None:
    """Prompts, chunks, drafts and output, with values beyond the range, through windows and soft caps as well."""
    (spec,) = (spec for spec in specs(manifest, variant) if spec.name == name)
    for pool, scales in (("float8_e4m3fn", KVScales(0.0078125, 0.00390625)), ("float8_e5m2", KVScales(0.5, 4.0))):
        world = World(platform, spec, 3, pool, scales=(scales,))
        layer = replace(world.layer, window=30, soft_cap=15.0)
        for queries, lengths, used in (
            ([20, 5, 40], [20, 5, 40], world.layer),
            ([1, 3, 17], [21, 8, 57], world.layer),
            ([1, 1, 1], [22, 9, 58], layer),
        ):
            q, k, v = world.rows(sum(queries))
            metadata = world.backend.plan(AttentionBatch(queries, lengths, world.device_table[:3]))
            got = world.backend.forward(used, *(tensor.to(world.device) for tensor in (q, k, v)), metadata)
            dtype = getattr(torch, pool)
            rounded = (
                round_trip_float8(x.double(), dtype, scale).float() for x, scale in zip((k, v), scales, strict=True)
            )
            world.compare(got, world.expected(queries, lengths, (q, *rounded), used))


def test_sinks_and_chunks_where_they_are_declared(every_backend: Worlds) -> None:
    """Prompts, drafts and output, with windows and soft caps as well; others refuse such layers."""
    declared = set()
    for spec, world in every_backend(3):
        sinks, chunks = replace(world.layer, sinks=True, sink_scores=SINKS), replace(world.layer, chunk=24)
        if "sinks" not in spec.traits:
            assert "attention sinks" in world.backend.supports(sinks)
            assert "within chunks of 24 tokens" in world.backend.supports(chunks)
            continue
        declared.add(spec.name)
        for layer in (sinks, chunks, replace(sinks, window=20, soft_cap=15.0), replace(sinks, chunk=24)):
            assert world.backend.supports(layer) is None
            world.check([30, 70, 5], [30, 70, 5], layer)
            world.check([1, 3, 12], [31, 73, 17], layer)
            world.check([1, 1, 1], [32, 74, 18], layer)
    assert declared == {"triton", "torch_native"}


@pytest.mark.parametrize("name", ["triton", "torch_native"])
def test_sinks_over_pools_of_8_bits(platform: GpuPlatform, manifest: Manifest, variant: str, name: str) -> None:
    """Scales apply to keys and values, and not to a sink's score: here sinks have all the weight, and no value."""
    (spec,) = (spec for spec in specs(manifest, variant) if spec.name == name)
    for pool in ("float8_e4m3fn", "int8"):
        if pool == "int8" and name == "torch_native":
            continue  # it does not read their scales
        world = World(platform, spec, 1, pool, **({} if pool == "int8" else {"scales": (KVScales(0.5, 0.25),)}))
        layer = replace(world.layer, sinks=True, sink_scores=(80.0,) * HEADS)
        for queries, length in ((20, 20), (1, 21)):
            metadata = world.backend.plan(AttentionBatch([queries], [length], world.device_table[:1]))
            new = (tensor.to(world.device) for tensor in world.rows(queries))
            got = world.backend.forward(layer, *new, metadata)
            assert float(got.abs().max()) < 1e-20
