"""Attention of a step with two backends: one for rows of one token, the other for longer rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attention_naive import NAME, NaiveAttention, install
from engine_small import Small, engine, make_small, messages
from host_transfers import HOST_TRANSFERS
from torch import Tensor

from srv.platform.interface import AttentionBackend, AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv.specs import FullAttention, KVLayout
from srv.worker.attention import SplitAttention, StepAttention

HEADS, KV_HEADS, DIM, LAYERS, PAGE, PAGES = 6, 2, 8, 2, 4, 40
MIXES = {
    "only decode": ([1, 1, 1], [5, 17, 1]),
    "only extend": ([4, 9], [4, 20]),
    "decode first": ([1, 1, 5, 3], [9, 33, 5, 12]),
    "between one another": ([3, 1, 2, 1, 1, 6], [3, 8, 7, 1, 30, 19]),
    "one of each, in one page": ([1, 2], [2, 4]),
}
NATIVE = "srv_cpu.attention"


def native(context: BackendContext) -> AttentionBackend:
    return cast(AttentionBackend, importlib.import_module(NATIVE).TorchNativeAttention(context))


class Pool:
    """A KV pool with random keys and values, which are the same for equal seeds."""

    def __init__(self, make: Callable[[BackendContext], AttentionBackend], value_dim: int = DIM) -> None:
        generator = torch.Generator().manual_seed(2)
        self.value_dim = value_dim
        group = FullAttention(tuple(range(LAYERS)), KV_HEADS, DIM, value_dim)
        dims = [DIM] * LAYERS + [value_dim] * LAYERS
        buffers = [torch.randn(PAGES + 1, PAGE, KV_HEADS, dim, generator=generator) for dim in dims]
        self.kv = KVBuffers(
            KVLayout(group, PAGE, "float32"), {"key": tuple(buffers[:LAYERS]), "value": tuple(buffers[LAYERS:])}
        )
        self.backend = make(BackendContext(cast(Any, None), torch.device("cpu"), self.kv, 8, HOST_TRANSFERS))

    def run(self, batch: AttentionBatch, window: int | None) -> list[Tensor]:
        """The output of two layers in one step."""
        generator = torch.Generator().manual_seed(3)
        tokens = sum(batch.query_lens)
        attend = StepAttention([self.backend], batch.query_lens, batch.kv_lens, [batch.page_table], batch.lengths)
        outs: list[Tensor] = []
        for index in range(LAYERS):
            layer = AttentionLayer(index, HEADS, KV_HEADS, DIM, DIM**-0.5, window)
            q, k = (torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
            v = torch.randn(tokens, KV_HEADS, self.value_dim, generator=generator)
            outs.append(attend(layer, q, k, v))
        return outs


def batch_of(query_lens: Sequence[int], kv_lens: Sequence[int]) -> AttentionBatch:
    """Pages are assigned from the last one down, each to one row."""
    pages = iter(range(PAGES, 0, -1))
    counts = [-(-length // PAGE) for length in kv_lens]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
    return AttentionBatch(list(query_lens), list(kv_lens), table)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.mark.parametrize("value_dim", [DIM, DIM - 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_two_backends_equal_one(mix: str, window: int | None, value_dim: int) -> None:
    batch = batch_of(*MIXES[mix])
    one = Pool(native, value_dim)
    two = Pool(lambda context: SplitAttention(native(context), native(context), HOST_TRANSFERS), value_dim)
    for mine, theirs in zip(two.run(batch, window), one.run(batch, window), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(two.kv.keys + two.kv.values, one.kv.keys + one.kv.values, strict=True):
        assert torch.equal(mine, theirs)


def test_each_row_goes_to_its_backend() -> None:
    seen: dict[str, list[int]] = {}

    class Recording(NaiveAttention):
        def __init__(self, context: BackendContext, name: str) -> None:
            super().__init__(context)
            self.name = name

        def plan(self, batch: AttentionBatch) -> Any:
            seen[self.name] = list(batch.kv_lens)
            return super().plan(batch)

    batch = batch_of(*MIXES["between one another"])
    split = Pool(
        lambda context: SplitAttention(Recording(context, "extend"), Recording(context, "decode"), HOST_TRANSFERS)
    )
    outs = split.run(batch, None)
    assert seen == {"extend": [3, 7, 19], "decode": [8, 1, 30]}
    for mine, theirs in zip(outs, Pool(NaiveAttention).run(batch, None), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": NAME},
        {"decode_attention_backend": NAME},
        {"prefill_attention_backend": NAME},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_an_engine_with_two_backends_has_the_tokens_of_transformers(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], overlap: bool
) -> None:
    """The second backend is in a separate distribution."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with engine(small, 4, 7, overlap, **flags) as served:
        assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
        assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
