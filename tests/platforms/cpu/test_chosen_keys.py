"""Sparse attention of the CPU platform: the keys that an indexer chooses, and attention to them, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every import every
from latent_attention_dense import LatentRows, assert_close, dense, latent_layer

from srv.errors import InternalError
from srv.platform.interface import BackendContext
from srv.platform.pools import plain_pool
from srv.specs import IndexDims, KVLayout, Latent, LatentDims
from srv_cpu.chosen_keys import largest
from srv_cpu.latent_attention import TorchLatentAttention
from srv_cpu.native_latent import NativeLatentAttention

HOST = torch.device("cpu")
SMALL = LatentDims(32, 12, 16, 10)
INDEXER = IndexDims(5, 24, 9)
STEPS = (
    [("a", 70), ("b", 1), ("c", 3)],
    [("b", 1), ("a", 1), ("c", 66)],
    [("c", 5), ("d", 130), ("a", 1), ("b", 2)],
    [("d", 1), ("c", 1), ("b", 1), ("a", 1)],
)


def rows(
    indexer: IndexDims | None, dtype: torch.dtype = torch.float32, page_size: int = 4, **arguments: bool
) -> LatentRows:
    """The second of two layers; the first has no indexer in its place of the pool. Unwritten slots hold NaN."""
    group = Latent((3, 4), SMALL.latent_dim, SMALL.rope_dim, index_dim=INDEXER.dim, indexed=(4,))
    pool = plain_pool(KVLayout(group, page_size, str(dtype).removeprefix("torch.")), 2000 // page_size, HOST)
    for tensor in pool.all():
        tensor.fill_(float("nan"))
    backend = TorchLatentAttention(BackendContext(None, HOST, pool, 8, None, arguments))  # type: ignore[arg-type]
    up = torch.randn(6, SMALL.key_dim + SMALL.value_dim, SMALL.latent_dim, generator=torch.Generator().manual_seed(3))
    layer = latent_layer(6, SMALL, 1, indexer)
    return LatentRows(layer, backend, pool, dtype, (up * SMALL.latent_dim**-0.5).to(dtype))


@every("dtype,page_size,absorb", [(torch.float32, 4, False), (torch.float32, 1, True), (torch.bfloat16, 16, False)])
def test_any_batch_agrees_with_dense_attention_to_the_best_keys(
    dtype: torch.dtype, page_size: int, absorb: bool
) -> None:
    """Prompts, chunks after a cached prefix, and single tokens, in one step and in any order."""
    with torch.inference_mode():
        world = rows(INDEXER, dtype, page_size, disable_mla_ragged_prefill=absorb)
        for step in STEPS:
            assert_close(*world.step(*step))


def test_a_query_without_keys_in_a_chunk_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are computed in chunks, which are merged."""
    monkeypatch.setattr("srv_cpu.latent_attention.PART", 16)
    with torch.inference_mode():
        world = rows(INDEXER._replace(top_k=2))
        assert_close(*world.step(("a", 150)))
        assert_close(*world.step(("a", 30), ("b", 40)))


@every("indexer", [INDEXER, None])
def test_sinks_take_their_part_of_the_weights(indexer: IndexDims | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks below, among and far above all scores, with keys in one chunk and in several."""
    sinks = (-200.0, -1.0, 0.0, 1.5, 8.0, 200.0)
    with torch.inference_mode():
        for chunk in (1024, 16):
            monkeypatch.setattr("srv_cpu.latent_attention.PART", chunk)
            world = rows(indexer)
            world.layer = dataclasses.replace(world.layer, sinks=True, sink_scores=sinks)
            assert world.backend.supports(world.layer) is None
            for step in STEPS:
                assert_close(*world.step(*step))


def test_rows_of_no_more_keys_than_are_chosen_have_the_bits_of_dense_attention() -> None:
    with torch.inference_mode():
        sparse, plain = rows(INDEXER._replace(top_k=200)), rows(None)
        for step in STEPS:
            got, _ = sparse.step(*step)
            assert sparse.last is not None
            batch, q, joined, rope = sparse.last
            plan = plain.backend.plan(batch)
            dense = plain.backend.forward(plain.layer, q, joined[..., : SMALL.latent_dim], rope, plan)
            assert torch.equal(got, dense)


def test_a_layer_without_an_indexer_reads_the_keys_of_the_one_before() -> None:
    with torch.inference_mode():
        world = rows(INDEXER)
        shared = dataclasses.replace(world.layer, index=0, indexer=INDEXER._replace(own=False))
        world.backend.prepare(shared, world.up)
        world.step(("a", 40), ("b", 1))
        assert world.last is not None
        batch, *operands = world.last
        q, latent, rope = (world.draw(41, *shape) for shape in ((6, 28), (1, 32), (1, 16)))
        plan = world.backend.plan(batch)
        with pytest.raises(InternalError, match="before the layer that chooses its keys"):
            world.backend.forward(shared, q, latent, rope, plan)
        world.backend.forward(world.layer, *operands, plan)
        got = world.backend.forward(shared, q, latent, rope, plan)
        chosen = {"a": slice(0, 40), "b": slice(40, 41)}
        expected = [
            dense(shared, q[keys], latent[keys, 0], rope[keys, 0], world.up, world.chosen[name])
            for name, keys in chosen.items()
        ]
        assert_close(got, torch.cat(expected))


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0, 0.0, -0.0, 0.0], [3.0, float("-inf"), 3.0, 1.0, 3.0, 2.0]])
    assert largest(scores, 4).int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1]]
    assert largest(scores, 2).int().tolist() == [[1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0]]
    assert largest(scores, 9).int().tolist() == [[1] * 6, [1, 0, 1, 1, 1, 1]]


def test_the_native_kernel_refuses_layers_with_an_indexer() -> None:
    pool = plain_pool(KVLayout(Latent((0,), 32, 16, index_dim=24, indexed=(0,)), 16, "float32"), 4, HOST)
    backend = NativeLatentAttention(BackendContext(None, HOST, pool, 8, None, {}))  # type: ignore[arg-type]
    reason = backend.supports(latent_layer(6, SMALL, 0, INDEXER))
    assert reason == "it does not support keys chosen by an indexer (sparse attention)"
