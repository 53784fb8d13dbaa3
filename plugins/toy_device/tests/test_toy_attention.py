"""Paged attention against a dense reference in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv.platform.transfers import Transfers
from srv.specs import FullAttention, KVLayout, ModelFacts
from srv_toy_device.attention import ToyPagedAttention
from srv_toy_device.device import Accelerator
from srv_toy_device.limits import attention_bytes
from srv_toy_device.platform import ToyPlatform

LAYER = AttentionLayer(index=1, heads=6, kv_heads=2, head_dim=16, scale=0.25)


class Pool:
    """A KV pool with one backend, and a dense copy of every row's context on the host."""

    def __init__(self, toy: Accelerator, layer: AttentionLayer, page_size: int, dtype: str, pages: int = 200) -> None:
        self.platform = ToyPlatform(toy)
        self.layer = layer
        group = FullAttention(tuple(range(2)), layer.kv_heads, layer.head_dim, layer.head_dim)
        self.kv: KVBuffers = self.platform.kv_buffers(KVLayout(group, page_size, dtype), pages)
        device = self.platform.device(0)
        transfers = Transfers(self.platform, device)
        self.backend = ToyPagedAttention(BackendContext(self.platform, device, self.kv, 8, transfers))
        self.page_size = page_size
        self.free = list(range(1, pages + 1))
        random.Random(0).shuffle(self.free)
        self.pages: list[list[int]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add_row(self) -> None:
        self.pages.append([])
        self.keys.append(torch.empty(0, self.layer.kv_heads, self.layer.head_dim, dtype=torch.float64))
        self.values.append(self.keys[-1])

    def step(self, query_lens: list[int], rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Extend `rows` by random tokens; the backend's output and the reference's, float64 on the host."""
        layer, tokens = self.layer, sum(query_lens)
        q = torch.randn(tokens, layer.heads, layer.head_dim).to(dtype)
        k = torch.randn(tokens, layer.kv_heads, layer.head_dim).to(dtype)
        v = torch.randn(tokens, layer.kv_heads, layer.head_dim).to(dtype)
        begin, wanted = 0, []
        for row, length in zip(rows, query_lens, strict=True):
            part = slice(begin, begin + length)
            self.keys[row] = torch.cat([self.keys[row], k[part].double()])
            self.values[row] = torch.cat([self.values[row], v[part].double()])
            wanted.append(dense(layer, q[part].double(), self.keys[row], self.values[row]))
            while len(self.pages[row]) * self.page_size < len(self.keys[row]):
                self.pages[row].append(self.free.pop())
            begin += length
        columns = max(len(self.pages[row]) for row in rows) + 1
        table = torch.tensor([self.pages[row] + [0] * (columns - len(self.pages[row])) for row in rows])
        batch = AttentionBatch(
            query_lens, [len(self.keys[row]) for row in rows], table.to(torch.int32).to(self.platform.device(0))
        )
        device = self.platform.device(0)
        with torch.inference_mode():
            out = self.backend.forward(layer, q.to(device), k.to(device), v.to(device), self.backend.plan(batch))
        assert out.dtype is dtype
        assert out.device.type == "toy"
        return out.cpu().double(), torch.cat(wanted)


def dense(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row: q [queries, heads, dim] at the end of k, v [keys, kv_heads, dim]; one head at a time."""
    queries, keys = len(q), len(k)
    out = torch.empty_like(q)
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = distance < 0
    if layer.window is not None:
        hidden |= distance >= layer.window
    for head in range(layer.heads):
        shared = head // (layer.heads // layer.kv_heads)
        scores = q[:, head] @ k[:, shared].T * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, shared]
    return out


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        replace(LAYER, kv_heads=6),
        replace(LAYER, kv_heads=1),
        replace(LAYER, window=5),
        replace(LAYER, soft_cap=1.5, window=1),
    ],
    ids=["gqa", "mha", "mqa", "window", "cap"],
)
def test_ragged_batches_with_prefixes(toy: Accelerator, layer: AttentionLayer, page_size: int) -> None:
    pool = Pool(toy, layer, page_size, "float32")
    choose = random.Random(page_size)
    for _ in range(4):
        pool.add_row()
    for _ in range(4):  # prompts, then chunks after prefixes and single tokens, in any mixture
        rows = choose.sample(range(4), choose.randint(1, 4))
        got, wanted = pool.step([choose.choice([1, 1, 2, 7, 19]) for _ in rows], rows, torch.float32)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


def test_long_steps_are_cut_into_pieces(toy: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srv_toy_device.attention.GATHERED_TOKENS", 40)
    monkeypatch.setattr("srv_toy_device.attention.SCORES_PER_HEAD", 64)
    pool = Pool(toy, LAYER, 4, "float32")
    for _ in range(3):
        pool.add_row()
    for lens in ([30, 7, 30], [1, 1, 1], [5, 5, 40]):
        got, wanted = pool.step(lens, [0, 1, 2], torch.float32)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)
    device = pool.platform.device(0)
    table = torch.zeros((3, 20), dtype=torch.int32, device=device)
    tiles = pool.backend.plan(AttentionBatch([30, 1, 1], [36, 18, 20], table)).tiles
    assert all(tile.rows * tile.queries * tile.slots.shape[1] <= 64 for tile in tiles)
    assert len(tiles) > 30


def test_memory_for_attention_stays_within_what_the_facts_reserve(toy: Accelerator) -> None:
    pool = Pool(toy, LAYER, 16, "float32", pages=2100)
    device = pool.platform.device(0)
    model = cast(ModelFacts, SimpleNamespace(context_length=4096, heads=6, cache_groups=(pool.kv.layout.group,)))
    q, k, v = (torch.zeros(512, heads, 16, device=device) for heads in (6, 2, 2))
    table = torch.arange(8 * 256, dtype=torch.int32, device=device).view(8, 256)
    for lens, contexts in (([512], [4096]), ([64] * 8, [4096] * 8), ([1] * 8, [4096] * 8)):
        with torch.inference_mode():
            metadata = pool.backend.plan(AttentionBatch(lens, contexts, table))
            before, toy.memory.peak = toy.memory_allocated(), 0
            tokens = sum(lens)
            pool.backend.forward(LAYER, q[:tokens], k[:tokens], v[:tokens], metadata)
        assert toy.max_memory_allocated() - before <= attention_bytes(model)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_narrow_types(toy: Accelerator, dtype: str, tolerance: float) -> None:
    pool = Pool(toy, LAYER, 16, dtype)
    pool.add_row()
    pool.add_row()
    for lens in ([9, 20], [1, 1], [1, 4]):
        got, wanted = pool.step(lens, [0, 1], getattr(torch, dtype))
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_a_batch_does_not_change_its_rows(toy: Accelerator) -> None:
    """A row alone, and beside others."""
    outputs = []
    for others in (0, 3):
        torch.manual_seed(5)
        pool = Pool(toy, LAYER, 4, "float32")
        pool.add_row()
        alone = [pool.step([6], [0], torch.float32)[0], pool.step([1], [0], torch.float32)[0]]
        for _ in range(others):
            pool.add_row()
        if others:
            pool.step([11] * others, [1, 2, 3], torch.float32)
        torch.manual_seed(6)
        got, wanted = pool.step([1] * (1 + others), list(range(1 + others)), torch.float32)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)
        outputs.append(alone)
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


def test_other_memory_may_hold_nan(toy: Accelerator) -> None:
    pool = Pool(toy, LAYER, 16, "float32")
    for buffer in (*pool.kv.keys, *pool.kv.values):
        buffer.fill_(float("nan"))
    pool.add_row()
    pool.add_row()
    for lens in ([3, 3], [1, 17], [1, 1]):
        got, wanted = pool.step(lens, [0, 1], torch.float32)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


def test_only_the_rows_own_slots_of_its_layer_are_written(toy: Accelerator) -> None:
    pool = Pool(toy, LAYER, 4, "float32")
    pool.add_row()
    pool.step([6], [0], torch.float32)
    written = pool.kv.keys[1].abs().sum((2, 3)).nonzero().tolist()
    first, second = pool.pages[0]
    assert sorted(written) == sorted([[first, slot] for slot in range(4)] + [[second, slot] for slot in range(2)])
    assert pool.kv.keys[0].abs().sum().item() == 0


def test_host_tensors_are_refused(toy: Accelerator) -> None:
    pool = Pool(toy, LAYER, 4, "float32")
    with pytest.raises(RuntimeError, match="same device"):
        pool.backend.plan(AttentionBatch([1], [1], torch.tensor([[1]], dtype=torch.int32)))


def test_a_pool_is_needed(toy: Accelerator) -> None:
    platform = ToyPlatform(toy)
    with pytest.raises(ValueError, match="KV pool"):
        ToyPagedAttention(
            BackendContext(platform, platform.device(0), None, 1, Transfers(platform, platform.device(0)))
        )
