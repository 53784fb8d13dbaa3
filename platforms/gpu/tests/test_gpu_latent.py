"""Latent attention of the GPU platforms with Triton's kernel, interpreted on a simulated GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from latent_attention_dense import LatentRows, assert_close, latent_layer

from srv.platform.interface import AttentionBatch, BackendContext
from srv.platform.transfers import Transfers
from srv.specs import KVLayout, Latent, LatentDims
from srv_gpu.facts import KV_ORDER, NUM_KV_SPLITS
from srv_gpu.platform import GpuPlatform
from srv_gpu.triton_latent import TritonLatentAttention
from srv_kernels.triton.latent_attention import LARGEST

DIMS = LatentDims(32, 12, 16, 10)


def latent_rows(platform: GpuPlatform, **arguments: int) -> LatentRows:
    layout = KVLayout(Latent((0,), DIMS.latent_dim, DIMS.rope_dim), 16, "float32", KV_ORDER)
    device = platform.device(0)
    pool = platform.kv_buffers(layout, 80)
    context = BackendContext(platform, device, pool, 80, Transfers(platform, device), arguments)
    up = torch.randn(6, DIMS.key_dim + DIMS.value_dim, DIMS.latent_dim) * DIMS.latent_dim**-0.5
    return LatentRows(latent_layer(6, DIMS), TritonLatentAttention(context), pool, torch.float32, up)


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
    assert world.backend.plan(AttentionBatch([1], [322], table)).splits == splits
    assert world.backend.plan(AttentionBatch([3], [324], table)).splits == 1


@pytest.mark.parametrize(("field", "what"), [("latent_dim", "compressed vectors"), ("rope_dim", "rotary keys")])
def test_vectors_that_no_program_holds_are_refused(platform: GpuPlatform, field: str, what: str) -> None:
    layer = latent_layer(6, DIMS._replace(**{field: LARGEST + 1}))
    reason = latent_rows(platform).backend.supports(layer)
    assert reason == f"{what} have {LARGEST + 1} elements, more than {LARGEST}"
