"""What the conformance kit cannot know: the memory that the facts reserve for the backends, and what they refuse.

The steps are larger than what the backends compute at once, so that the results show that nothing is lost at a border.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers, Platform, SamplingBatch
from srv.platform.manifest import EngineContext
from srv.platform.transfers import Transfers
from srv.specs import CacheSpec, FullAttention, KVLayout, ModelFacts, SlidingWindow
from srv_toy_device.attention import ToyPagedAttention
from srv_toy_device.facts import FACTS, KV_ORDER, check_attention
from srv_toy_device.limits import attention_bytes, sampling_bytes
from srv_toy_device.manifest import MANIFEST
from srv_toy_device.sampling import ToySampling

CONTEXT, PAGE = 4096, 16


@pytest.fixture(scope="module")
def platform() -> Platform:
    platform = MANIFEST.create(EngineContext(next(iter(FACTS.profiles.values())), local_rank=0))
    platform.init_worker(0)
    return platform


def context(platform: Platform, kv: KVBuffers | None = None) -> BackendContext:
    device = platform.device(0)
    return BackendContext(platform, device, kv, 8, Transfers(platform, device))


def measured(platform: Platform, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The result of a call on the host, and the bytes that it took at most, beside those that were there."""
    before = platform.memory_use(platform.device(0), reset_peak=True).now
    with torch.inference_mode():
        result = work()
    peak = platform.memory_use(platform.device(0), reset_peak=False).peak
    assert peak is not None
    return result.cpu(), peak - before


@pytest.mark.parametrize(
    ("queries", "lengths"),
    [([512], [CONTEXT]), ([64] * 8, [CONTEXT] * 8), ([1] * 8, [CONTEXT] * 8)],
    ids=["prompt", "chunks", "decoding"],
)
def test_attention_takes_no_more_than_is_reserved(platform: Platform, queries: list[int], lengths: list[int]) -> None:
    """Queries of zeros attend to all that they see alike, and what was there before the step is zero."""
    layer, device = AttentionLayer(index=0, heads=6, kv_heads=2, head_dim=16, scale=0.25), platform.device(0)
    group = FullAttention((0,), layer.kv_heads, layer.head_dim, layer.head_dim)
    pages = 8 * CONTEXT // PAGE
    pool = platform.kv_buffers(KVLayout(group, PAGE, "float32", KV_ORDER), pages)
    for buffer in pool.all():
        buffer.zero_()
    backend = ToyPagedAttention(context(platform, pool))
    q, k = (torch.zeros(sum(queries), heads, layer.head_dim, device=device) for heads in (6, 2))
    values = torch.randn(sum(queries), layer.kv_heads, layer.head_dim)
    v = values.to(device)
    table = torch.arange(1, pages + 1, dtype=torch.int32).view(8, -1)[: len(queries)].to(device)
    metadata = backend.plan(AttentionBatch(queries, lengths, table))
    result, used_bytes = measured(platform, lambda: backend.forward(layer, q, k, v, metadata))
    model = cast(ModelFacts, SimpleNamespace(context_length=CONTEXT, heads=layer.heads, cache_groups=(group,)))
    assert used_bytes <= attention_bytes(model)
    seen = torch.cat([torch.arange(length - count, length) + 1 for count, length in zip(queries, lengths, strict=True)])
    means = torch.cat([row.cumsum(0) for row in values.split(queries)]) / seen[:, None, None]
    torch.testing.assert_close(result, means.repeat_interleave(3, dim=1), atol=1e-6, rtol=1e-5)


def test_sampling_takes_no_more_than_is_reserved(platform: Platform) -> None:
    rows, vocab, device = 30, 30_000, platform.device(0)

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype).to(device)

    logits = torch.randn(rows, vocab)
    batch = SamplingBatch(
        logits=logits.to(device),
        temperature=column(1.0),
        top_k=column(1, torch.int32),
        top_p=column(0.5),
        min_p=column(0.1),
        uniform=column(0.5, torch.float64),
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        largest_top_k=1,
    )
    backend = ToySampling(context(platform))
    tokens, used_bytes = measured(platform, lambda: backend.sample(batch))
    assert used_bytes <= sampling_bytes(cast(ModelFacts, SimpleNamespace(vocab_size=vocab)))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_attention_says_which_models_it_cannot_serve() -> None:
    def check(*groups: CacheSpec) -> Requires | Unfit:
        return check_attention(cast(ResolutionContext, SimpleNamespace(model=SimpleNamespace(cache_groups=groups))))

    assert isinstance(check(FullAttention((0,), 2, 16, 16), SlidingWindow((1,), 2, 16, 16, 8)), Requires)
    refused = check(FullAttention((0,), 1, 576, 512))
    assert isinstance(refused, Unfit)
    assert len(refused.reasons) == 1
