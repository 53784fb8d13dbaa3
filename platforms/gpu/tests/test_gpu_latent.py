"""Latent attention of the GPU platforms with Triton's kernel, interpreted on a simulated GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from every import every
from latent_attention_dense import LatentRows, assert_close, latent_layer

from srv.platform.interface import AttentionBatch, BackendContext
from srv.platform.transfers import Transfers
from srv.specs import KVLayout, Latent, LatentDims
from srv_gpu.facts import ABSORB_PREFILL, KV_ORDER, NUM_KV_SPLITS, WHOLE_PREFIX
from srv_gpu.latent_prefill import Part, fewest_materialised
from srv_gpu.platform import GpuPlatform
from srv_gpu.triton_latent import TritonLatentAttention
from srv_kernels.triton.latent_attention import LARGEST

DIMS = LatentDims(32, 12, 16, 10)
DEEPSEEK = LatentDims(512, 128, 64, 128)


def latent_rows(
    platform: GpuPlatform, dims: LatentDims = DIMS, dtype: torch.dtype = torch.float32, **arguments: int
) -> LatentRows:
    layout = KVLayout(Latent((0,), dims.latent_dim, dims.rope_dim), 16, str(dtype).removeprefix("torch."), KV_ORDER)
    device = platform.device(0)
    pool = platform.kv_buffers(layout, 80)
    for tensor in pool.all():
        tensor.fill_(float("nan"))
    context = BackendContext(platform, device, pool, 80, Transfers(platform, device), arguments)
    up = (torch.randn(6, dims.key_dim + dims.value_dim, dims.latent_dim) * dims.latent_dim**-0.5).to(dtype)
    return LatentRows(latent_layer(6, dims), TritonLatentAttention(context), pool, dtype, up)


def test_any_batch_agrees_with_dense_attention(platform: GpuPlatform) -> None:
    """Prompts, chunks after a cached prefix, and single tokens."""
    world = latent_rows(platform)
    for step in ([("a", 20), ("b", 1), ("c", 3)], [("b", 5), ("a", 1)], [("a", 1), ("c", 1), ("b", 1)]):
        assert_close(*world.step(*step))


@pytest.mark.parametrize(("most", "splits"), [({}, 3), ({NUM_KV_SPLITS: 1}, 1)])
def test_the_user_limits_the_splits_of_a_row(platform: GpuPlatform, most: dict[str, int], splits: int) -> None:
    """Of 321 tokens; results are equal, launches are not. Rows of several tokens are not divided."""
    world = latent_rows(platform, **most)
    world.pages["a"] = list(range(1, 21))
    latent, rope = world.draw(320, DIMS.latent_dim), world.draw(320, DIMS.rope_dim)
    world.seen["a"] = latent, rope, latent[:, :0]
    for name, vectors in (("latent", latent), ("rope", rope)):
        world.pool.tensors[name][0][1:21].copy_(vectors.view(20, 16, -1))
    world._free = list(range(21, 40))
    assert_close(*world.step(("a", 1)))
    table = torch.ones(1, 21, dtype=torch.int32).to(platform.device(0))
    assert world.backend.plan(AttentionBatch([1], [322], table)).short.splits == splits
    assert world.backend.plan(AttentionBatch([3], [324], table)).short.splits == 1


@every("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_rows_are_materialised_and_their_cached_keys_read_in_parts(
    platform: GpuPlatform, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 24 keys: of one row, of several, ending at and between pages and chunks; beside rows that are absorbed.

    Rows of up to 16 tokens are absorbed. The last step has no short row, and one without a prefix.
    """
    monkeypatch.setattr("srv_gpu.triton_latent.PART", 24)
    world = latent_rows(platform, dtype=dtype)
    for step, parts in (
        ([("a", 40), ("b", 5), ("c", 24), ("d", 17)], [81]),
        ([("b", 1), ("a", 17), ("d", 16), ("c", 18)], [35, 24, 24, 16]),
        ([("d", 30), ("b", 19), ("e", 17)], [66, 24, 15]),
    ):
        assert_close(*world.step(*step))
        plan = world.backend.plan(world.last[0])
        assert [keys(part) for part in plan.long.parts] == parts
        assert (plan.short is None) == ("e" in dict(step))


def keys(part: Part) -> int:
    return int((part.segments[:, 3] - part.segments[:, 2]).sum())


def test_sizes_of_published_models(platform: GpuPlatform) -> None:
    """DeepSeek-V3: from 171 query tokens on. Keys with their rotated part are no power of two."""
    world = latent_rows(platform, DEEPSEEK, torch.bfloat16)
    assert fewest_materialised(DEEPSEEK) == 171
    for step, long in (([("a", 170)], False), ([("a", 171), ("b", 2)], True)):
        assert_close(*world.step(*step))
        assert (world.backend.plan(world.last[0]).long is not None) == long


def test_no_row_is_materialised_where_that_takes_more_products(platform: GpuPlatform) -> None:
    dims = LatentDims(16, 24, 8, 24)
    assert fewest_materialised(dims) is None
    world = latent_rows(platform, dims)
    assert_close(*world.step(("a", 100)))
    assert world.backend.plan(world.last[0]).long is None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({}, [36, 24, 24, 2]),
        ({ABSORB_PREFILL: False, WHOLE_PREFIX: False}, [36, 24, 24, 2]),
        ({ABSORB_PREFILL: True}, None),
        ({WHOLE_PREFIX: True}, [36, 10, 40]),
    ],
)
def test_the_user_chooses_how_prompts_are_computed(
    platform: GpuPlatform, arguments: dict[str, bool], parts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """disable_mla_ragged_prefill: absorbed. disable_chunked_prefix_cache: the prefix of each row is one part."""
    monkeypatch.setattr("srv_gpu.triton_latent.PART", 24)
    world = latent_rows(platform, **arguments)
    for step in ([("a", 40), ("b", 10)], [("b", 19), ("a", 17)]):
        assert_close(*world.step(*step))
    long = world.backend.plan(world.last[0]).long
    assert (None if long is None else [keys(part) for part in long.parts]) == parts


def test_cached_keys_that_only_the_host_expects_are_not_read(platform: GpuPlatform) -> None:
    """While drafts are in flight, KV lengths on the host are upper bounds: the part has fewer keys, or none."""
    world = latent_rows(platform)
    world.step(("a", 20), ("b", 20))
    assert_close(*world.step(("a", 17), ("b", 18)))
    batch, q, latent, rope = world.last
    got = world.backend.forward(world.layer, q, latent, rope, world.backend.plan(batch))
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32).to(q.device)
    table = torch.nn.functional.pad(batch.page_table, (0, 4))
    few = AttentionBatch(batch.query_lens, [37 + 9, 38 + 40], table, None, lengths)
    assert torch.equal(world.backend.forward(world.layer, q, latent, rope, world.backend.plan(few)), got)


@pytest.mark.parametrize(("field", "what"), [("latent_dim", "compressed vectors"), ("rope_dim", "rotary keys")])
def test_vectors_that_no_program_holds_are_refused(platform: GpuPlatform, field: str, what: str) -> None:
    layer = latent_layer(6, DIMS._replace(**{field: LARGEST + 1}))
    reason = latent_rows(platform).backend.supports(layer)
    assert reason == f"{what} have {LARGEST + 1} elements, more than {LARGEST}"
