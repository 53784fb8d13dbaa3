"""Sliding windows and attention to later tokens of backend "ascend", against attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from conftest import context
from test_npu_attention import KV_HEADS, CapturedStep, World, close, dense, layer
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBackend, AttentionBatch, AttentionLayer, GraphKey
from srv.specs import FullAttention, KVLayout
from srv.worker.attention import PlannedAttention
from srv_npu.attention import AscendAttention
from srv_npu.limits import KV_ORDER, PAGE
from srv_npu.platform import NpuPlatform

WINDOWS = (1, 5, 127, 128, 129, 130, 300)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", WINDOWS)
def test_steps_of_every_kind_see_their_window(platform: NpuPlatform, dim: int, window: int) -> None:
    """Prompts that end before, at and past a page; chunks, decode, and both at once. All else in the pool is NaN."""
    world = World(platform, dim, torch.bfloat16, rows=4, foreign=float("nan"), window=window)
    world.step(127, 128, 129, 2)
    world.step(1, 1, 1, 1)
    world.step(140, 1, 3, 1)
    world.step(1, 130, 1, 1)
    world.step(1, 1, 1, 1)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_captured_step_sees_its_window_in_each_replay(platform: NpuPlatform, window: int) -> None:
    """Rows cross the ends of pages, at which the first page of their windows changes."""
    world = World(platform, 64, torch.float16, rows=4, foreign=float("nan"), window=window)
    world.step(5, 126, 300, 128)
    step = CapturedStep(world, platform)
    for _ in range(4):
        step.replay()


def test_windows_that_hide_nothing_take_the_calls_of_full_attention(platform: NpuPlatform) -> None:
    world = World(platform, 128, torch.bfloat16, rows=2, window=130)
    rows = [world.plan(world.batch(lengths)).step for lengths in ([127, 3], [129, 131])]
    planned = [world.backend._planner.rows(step, 130) for step in rows if step is not None]
    assert [step.packed is not None for step in planned] == [True, False]
    assert [step.window for step in planned] == [None, 130]


def test_decode_reads_the_pages_of_its_window_alone(platform: NpuPlatform) -> None:
    """However a window of 130 tokens lies, it touches 3 pages: the table that the operator gets has no more."""
    world = World(platform, 64, torch.bfloat16, rows=1, window=130)
    world.step(511)
    step = world.plan(world.batch([1])).step
    assert step is not None
    decode = world.backend._planner.rows(step, 130).decode
    assert decode is not None
    assert decode.table.tolist() == [[*world.table[0, 2:].tolist(), world.table[0, 3].item()]]
    assert decode.kv_lens.values == [256]


class Pair:
    """Two layers of one model, in one pool or each in its own, captured in one graph."""

    def __init__(self, platform: NpuPlatform, windows: Sequence[int | None], pools: int) -> None:
        self.platform, self.rows = platform, 3
        self.layers = [layer(64, window=window) for window in windows]
        if pools == 1:
            self.layers = [replace(old, index=index) for index, old in enumerate(self.layers)]
        else:
            self.layers = [replace(old, group=index) for index, old in enumerate(self.layers)]
        self.backends: list[AttentionBackend] = [self._backend(len(windows) // pools) for _ in range(pools)]
        self.table = torch.arange(1, 1 + self.rows * 4, dtype=torch.int32).view(self.rows, 4)
        self.static = self.table.to(platform.device(0))
        self.keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in windows]
        self.length = 0

    def _backend(self, layers: int) -> AscendAttention:
        layout = KVLayout(FullAttention(tuple(range(layers)), KV_HEADS, 64, 64), PAGE, "float16", KV_ORDER)
        return AscendAttention(replace(context(self.platform), kv=self.platform.kv_buffers(layout, 20)))

    def plan(self, tokens: int, graph: int | None) -> PlannedAttention:
        batch = AttentionBatch([tokens] * self.rows, [self.length + tokens] * self.rows, self.static, graph)
        self.metadata = [backend.plan(batch) for backend in self.backends]
        return PlannedAttention(self.backends, self.metadata)

    def inputs(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        count = self.rows * tokens
        return [
            (torch.randn(count, 6, 64).half(), *(torch.randn(count, KV_HEADS, 64).half() for _ in range(2)))
            for _ in self.layers
        ]

    def check(self, got: Sequence[Tensor], inputs: Sequence[tuple[Tensor, Tensor, Tensor]], tokens: int) -> None:
        for attention_layer, out, (q, k, v), history in zip(self.layers, got, inputs, self.keys, strict=True):
            history.append((k.unflatten(0, (self.rows, -1)), v.unflatten(0, (self.rows, -1))))
            keys, values = (torch.cat(parts, 1) for parts in zip(*history, strict=True))
            rows = zip(q.unflatten(0, (self.rows, -1)), keys, values, strict=True)
            close(out, torch.cat([dense(attention_layer, *row) for row in rows]))
        self.length += tokens


@pytest.mark.parametrize("pools", [1, 2])
def test_layers_with_and_without_a_window_take_their_own_lengths_in_one_graph(
    platform: NpuPlatform, pools: int
) -> None:
    """A replay updates two calls, whose lengths differ: those of the window count from its first page."""
    pair, device = Pair(platform, (None, 100), pools), platform.device(0)
    inputs = pair.inputs(250)
    attend = pair.plan(250, None)
    got = [
        attend(attention_layer, *(x.to(device) for x in operands))
        for attention_layer, operands in zip(pair.layers, inputs, strict=True)
    ]
    pair.check(got, inputs, 250)

    static = [tuple(x.to(device) for x in operands) for operands in pair.inputs(1)]
    attend = pair.plan(1, pair.rows)

    def run() -> Tensor:
        return torch.stack(
            [attend(attention_layer, *operands) for attention_layer, operands in zip(pair.layers, static, strict=True)]
        )

    out = platform.graphs.capture(GraphKey("decode", pair.rows), run)
    for _ in range(8):  # past the end of a page
        inputs = pair.inputs(1)
        for operands, new in zip(static, inputs, strict=True):
            for static_input, fresh in zip(operands, new, strict=True):
                static_input.copy_(fresh)
        pair.plan(1, pair.rows)
        platform.graphs.replay(GraphKey("decode", pair.rows), pair.metadata)
        pair.check(list(out), inputs, 1)


def encoder(platform: NpuPlatform, dim: int) -> AscendAttention:
    """The backend of a model whose layers have no place in the pool."""
    kv = platform.kv_buffers(KVLayout(FullAttention((), KV_HEADS, dim, dim), PAGE, "bfloat16", KV_ORDER), 4)
    return AscendAttention(replace(context(platform), kv=kv))


def both_ways(platform: NpuPlatform, of: AttentionLayer, lengths: Sequence[int]) -> None:
    """One step of whole sequences, equal to dense attention."""
    backend, device = encoder(platform, of.head_dim), platform.device(0)
    q, k, v = (torch.randn(sum(lengths), heads, of.head_dim).bfloat16() for heads in (of.heads, KV_HEADS, KV_HEADS))
    pages = torch.zeros(len(lengths), 4, dtype=torch.int32).to(device)
    metadata = backend.plan(AttentionBatch(lengths, lengths, pages))
    got = backend.forward(of, *(tensor.to(device) for tensor in (q, k, v)), metadata)
    rows = zip(*(tensor.split(list(lengths)) for tensor in (q, k, v)), strict=True)
    close(got, torch.cat([dense(of, *row) for row in rows]))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 129, 1000])
def test_encoders_see_later_tokens(platform: NpuPlatform, dim: int, window: int | None) -> None:
    of = layer(dim, window=window, bidirectional=True)
    assert encoder(platform, dim).supports(of) is None
    both_ways(platform, of, (7,))
    both_ways(platform, of, (3, 1, 300, 5))


def test_a_part_of_a_sequence_is_no_step_of_an_encoder(platform: NpuPlatform) -> None:
    pages = torch.zeros(1, 4, dtype=torch.int32).to(platform.device(0))
    with pytest.raises(InternalError, match="whole sequences"):
        encoder(platform, 64).plan(AttentionBatch([3], [7], pages))
