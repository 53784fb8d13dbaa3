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

from srv.platform.facts import BackendSpec, Requires
from srv.platform.interface import AttentionBatch, AttentionLayer
from srv.platform.manifest import Manifest
from srv.platform.pools import plain_pool
from srv_gpu.graphs import GpuGraphs
from srv_gpu.platform import GpuPlatform

HEADS, KV_HEADS, COLUMNS = 8, 2, 6
FIXED = {"flashinfer": ("bfloat16", 64), "aiter": ("bfloat16", 128)}  # of kernels for 16-bit dtypes and some heads
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


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

    def __init__(self, platform: GpuPlatform, spec: BackendSpec, rows: int) -> None:
        self.dtype, self.dim = FIXED.get(spec.name, ("float32", 64))
        made = context(platform, dim=self.dim, dtype=self.dtype)
        assert made.kv is not None
        self.transfers, self.device = made.transfers, made.device
        self.backend = pkgutil.resolve_name(spec.target)(made)
        host: Any = SimpleNamespace(kv=plain_pool(made.kv.layout, 40, torch.device("cpu")))
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
        got = self.backend.forward(used, *(each.to(self.device) for each in new), metadata)
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


def test_lengths_that_exist_only_on_the_device(every_backend: Worlds) -> None:
    """The host knows upper bounds: here three tokens more than there are."""
    for spec, world in every_backend(2):
        if spec.lengths != "device":
            continue
        world.check([10, 33], [10, 33])
        new = world.rows(2)
        lengths = torch.tensor([11, 34], dtype=torch.int32, device=world.device)
        metadata = world.backend.plan(AttentionBatch([1, 1], [14, 37], world.device_table, lengths=lengths))
        got = world.backend.forward(world.layer, *(each.to(world.device) for each in new), metadata)
        world.compare(got, world.expected([1, 1], [11, 34], new))


def test_replays_read_lengths_and_pages_of_their_step(platform: GpuPlatform, every_backend: Worlds) -> None:
    """Of three rows, the last is padding at first. Steps are planned and replayed without a wait in between."""
    if platform.graphs is None:
        pytest.skip("the platform captures no steps")
    for spec, world in every_backend(3):
        if not spec.graphs:
            continue
        world.check([10, 33, 60], [10, 33, 60])
        table = torch.zeros(3, COLUMNS, dtype=torch.int32, device=world.device)
        q, k, v = (torch.zeros_like(each, device=world.device) for each in world.rows(3))
        metadata = world.backend.plan(AttentionBatch([1] * 3, [1] * 3, table, graph=3))
        graphs = GpuGraphs(platform._accelerator)
        out = graphs.capture(3, partial(world.backend.forward, world.layer, q, k, v, metadata))
        got, want = [], []
        for lengths, pages in (([11, 34, 1], 2), ([12, 35, 61], 3), ([13, 36, 62], 3)):
            new = world.rows(3)
            for fixed, values in zip((q, k, v), new, strict=True):
                fixed.copy_(values)
            table[:pages].copy_(world.device_table[:pages])
            graphs.replay(3, [world.backend.plan(AttentionBatch([1] * 3, lengths, table, graph=3))])
            got.append(out[:pages].clone())
            want.append(world.expected([1] * pages, lengths[:pages], tuple(each[:pages] for each in new)))
        for one, other in zip(got, want, strict=True):
            world.compare(one, other)
