"""Latent attention of backend "ascend" against float64: absorbed and materialised rows, cached parts, and graphs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from latent_attention_dense import LatentRows, assert_close, dense, latent_layer
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, BackendContext, GraphKey
from srv.platform.transfers import Transfers
from srv.specs import KVLayout, Latent, LatentDims
from srv_npu import latent_attention
from srv_npu.latent_attention import AscendLatentAttention
from srv_npu.limits import PAGE
from srv_npu.platform import NpuPlatform

DTYPES = (torch.bfloat16, torch.float16)
DIMS = LatentDims(512, 128, 64, 128)


def context(platform: NpuPlatform, dtype: torch.dtype, pages: int = 40) -> BackendContext:
    layout = KVLayout(Latent((0,), DIMS.latent_dim, DIMS.rope_dim), PAGE, str(dtype).removeprefix("torch."))
    place = platform.device(0)
    pool = platform.kv_buffers(layout, pages)
    for buffer in pool.all():
        buffer.fill_(float("nan"))  # nothing may be read that no row has written
    return BackendContext(platform, place, pool, 16, Transfers(platform, place))


def world(platform: NpuPlatform, heads: int, dtype: torch.dtype) -> LatentRows:
    build = context(platform, dtype)
    assert build.kv is not None
    up = torch.randn(heads, DIMS.key_dim + DIMS.value_dim, DIMS.latent_dim) * DIMS.latent_dim**-0.5
    return LatentRows(latent_layer(heads, DIMS), AscendLatentAttention(build), build.kv, dtype, up.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 5])
def test_any_batch_agrees_with_dense_attention(platform: NpuPlatform, heads: int, dtype: torch.dtype) -> None:
    """Prompts, chunks after a cached prefix and single tokens in any order; five heads are computed as eight."""
    rows = world(platform, heads, dtype)
    for step in (
        [("a", 130), ("b", 1), ("c", 16), ("d", 17)],
        [("b", 1), ("a", 1), ("c", 66)],
        [("c", 5), ("e", 100), ("a", 20), ("b", 2)],
        [("c", 3), ("a", 1)],
        [("e", 40), ("a", 129)],
        [("d", 1), ("c", 1), ("b", 1), ("a", 1)],
    ):
        assert_close(*rows.step(*step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cached_prefix_is_read_in_parts(
    platform: NpuPlatform, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a page each, of which the last is not full."""
    monkeypatch.setattr(latent_attention, "_PART", PAGE)
    rows = world(platform, 2, dtype)
    assert_close(*rows.step(("a", 300), ("b", 140)))
    assert_close(*rows.step(("b", 33), ("c", 1), ("a", 140)))
    plan = rows.backend.plan(AttentionBatch([20], [460], torch.ones(1, 4, dtype=torch.int32).to(platform.device(0))))
    platform._sdk().npu.synchronize()  # before what it copies from is dropped
    assert [(part.keys, len(part.pages)) for part in plan.materialised.cached] == [(128, 1)] * 3 + [(56, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 4])
def test_a_captured_step_takes_the_lengths_of_each_replay(
    platform: NpuPlatform, heads: int, dtype: torch.dtype
) -> None:
    rows = world(platform, heads, dtype)
    names = ("a", "b", "c")
    rows.step(*zip(names, (126, 5, 40), strict=True))
    graphs, place = platform.graphs, platform.device(0)
    inputs = [rows.draw(3, *shape).to(place) for shape in ((heads, 192), (1, 512), (1, 64))]
    table = torch.zeros(3, 4, dtype=torch.int32).to(place)

    def plan() -> latent_attention.LatentMetadata:
        for index, name in enumerate(names):
            while len(rows.pages[name]) * PAGE < len(rows.seen[name][0]) + 1:
                rows.pages[name].append(rows._free.pop())
            page_row = torch.tensor(rows.pages[name], dtype=torch.int32)
            table[index, : len(page_row)].copy_(page_row)
        return rows.backend.plan(AttentionBatch([1] * 3, [len(rows.seen[name][0]) + 1 for name in names], table, 3))

    first = plan()
    out = graphs.capture(
        GraphKey("decode", 3), lambda: rows.backend.forward(rows.layer, inputs[0], inputs[1], inputs[2], first)
    )
    for _ in range(4):
        fresh = [rows.draw(*static.shape) for static in inputs]
        for static_input, new in zip(inputs, fresh, strict=True):
            static_input.copy_(new)
        metadata = plan()
        assert metadata.slots.data_ptr() == first.slots.data_ptr()
        graphs.replay(GraphKey("decode", 3), [metadata])
        expected: list[Tensor] = []
        for index, name in enumerate(names):
            row_slice = slice(index, index + 1)
            latent, rope, index = rows.seen[name]
            keys = torch.cat((latent, fresh[1][row_slice, 0])), torch.cat((rope, fresh[2][row_slice, 0]))
            rows.seen[name] = (*keys, index)
            expected.append(dense(rows.layer, fresh[0][row_slice], *keys, rows.up))
        assert_close(out.cpu(), torch.cat(expected))


@pytest.mark.parametrize(
    ("heads", "dims", "reason"),
    [
        (128, DIMS, None),
        (129, DIMS, "129 query heads of latent attention are more than 128"),
        (8, LatentDims(256, 128, 64, 128), r"caches 256 \+ 64 elements per token; only 512 \+ 64 can be read"),
        (8, LatentDims(512, 128, 32, 128), r"caches 512 \+ 32 elements per token; only 512 \+ 64 can be read"),
        (8, LatentDims(512, 192, 64, 256), "keys of 192 and values of 256 elements per head .* only 128 and 128"),
    ],
)
def test_layers_that_the_operator_does_not_compute_are_refused(
    platform: NpuPlatform, heads: int, dims: LatentDims, reason: str | None
) -> None:
    backend = AscendLatentAttention(context(platform, torch.bfloat16, pages=1))
    answer = backend.supports(latent_layer(heads, dims))
    if reason is None:
        assert answer is None
    else:
        assert answer is not None
        assert re.search(reason, answer)
    assert "a soft cap" in str(backend.supports(replace(latent_layer(8, DIMS), soft_cap=30.0)))


def test_a_pool_that_no_call_reads_is_refused(platform: NpuPlatform) -> None:
    build = context(platform, torch.bfloat16, pages=1)
    assert build.kv is not None
    kv = replace(build.kv, layout=replace(build.kv.layout, page_size=64))
    for wrong in (replace(build, kv=kv), replace(build, max_rows=4097)):
        with pytest.raises(InternalError, match="pages of 128 tokens in steps of up to 4096 rows, not pages of "):
            AscendLatentAttention(wrong)
