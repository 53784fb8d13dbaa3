"""Latent attention of the CPU platform, with torch operators and with the native kernel, against float64."""

from __future__ import annotations

from typing import Any

import torch
from every import every
from latent_attention_dense import LatentRows, assert_close, latent_layer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from srv.platform.interface import BackendContext
from srv.platform.pools import plain_pool
from srv.specs import KVLayout, Latent, LatentDims
from srv_cpu.latent_attention import TorchLatentAttention
from srv_cpu.latent_forms import ABSORB_PREFILL, WHOLE_PREFIX
from srv_cpu.native_latent import NativeLatentAttention
from srv_matrix.pytest_plugin import covers

HOST = torch.device("cpu")
DEEPSEEK = LatentDims(512, 128, 64, 128)
SMALL, ODD = LatentDims(32, 12, 16, 10), LatentDims(48, 7, 16, 33)
BACKENDS = (TorchLatentAttention, NativeLatentAttention)


def rows(
    kind: Any, heads: int, dims: LatentDims, dtype: torch.dtype = torch.float32, page_size: int = 16, **more: Any
) -> LatentRows:
    """Over a pool that contains NaN wherever nothing was written."""
    arguments, pages = more.pop("arguments", {}), more.pop("pages", 40)
    group = Latent((0,), dims.latent_dim, dims.rope_dim)
    pool = plain_pool(KVLayout(group, page_size, str(dtype).removeprefix("torch.")), pages, HOST)
    for tensor in pool.all():
        tensor.fill_(float("nan"))
    backend = kind(BackendContext(None, HOST, pool, 8, None, arguments))  # type: ignore[arg-type]
    up = torch.randn(heads, dims.key_dim + dims.value_dim, dims.latent_dim, generator=torch.Generator().manual_seed(3))
    return LatentRows(latent_layer(heads, dims), backend, pool, dtype, (up * dims.latent_dim**-0.5).to(dtype), **more)


@every("kind", BACKENDS)
@every("heads,dims,dtype,page_size", [
    (16, SMALL, torch.float32, 16),
    (5, ODD, torch.float32, 1),
    (20, SMALL, torch.bfloat16, 32),
    (17, DEEPSEEK, torch.bfloat16, 64),
])  # fmt: skip
def test_any_batch_agrees_with_dense_attention(
    kind: Any, heads: int, dims: LatentDims, dtype: torch.dtype, page_size: int
) -> None:
    """Prompts, chunks after a cached prefix, and single tokens, in one step and in any order."""
    with torch.inference_mode():
        world = rows(kind, heads, dims, dtype, page_size, pages=2000 // page_size + 9)
        for step in (
            [("a", 70), ("b", 1), ("c", 3)],
            [("b", 1), ("a", 1), ("c", 66)],
            [("c", 5), ("d", 130), ("a", 1), ("b", 2)],
            [("d", 1), ("c", 1), ("b", 1), ("a", 1)],
        ):
            assert_close(*world.step(*step))


@every("kind", BACKENDS)
def test_a_long_row_is_divided_and_merged(kind: Any) -> None:
    with torch.inference_mode():
        world = rows(kind, 3, SMALL, pages=300)
        assert_close(*world.step(("a", 2100)))
        assert_close(*world.step(("a", 1), ("b", 4)))
        assert_close(*world.step(("a", 300), ("b", 1)))


@every("kind", BACKENDS)
def test_large_scores_do_not_overflow(kind: Any) -> None:
    with torch.inference_mode():
        world = rows(kind, 2, SMALL, magnitude=30.0)
        got, expected = world.step(("a", 40))
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-2)
        assert torch.isfinite(world.step(("a", 1))[0]).all()


@every("dims", (SMALL, LatentDims(32, 16, 16, 16)))
def test_undivided_rows_have_the_same_bits_in_any_chunks_and_batches(dims: LatentDims) -> None:
    """As --enable-deterministic-inference needs: one pass, and token by token; also where rows else have two forms."""
    arguments = {"enable_deterministic_inference": True}
    with torch.inference_mode():
        whole = rows(NativeLatentAttention, 6, dims, torch.bfloat16, arguments=arguments, pages=200)
        parts = rows(NativeLatentAttention, 6, dims, torch.bfloat16, arguments=arguments, pages=200)
        drawn = [whole.draw(1300, *shape) for shape in ((6, dims.key_dim + 16), (1, 32), (1, 16))]
        one = _given(whole, drawn, [1300])
        many = _given(parts, drawn, [1100, 3, 1, 1, 64, 130, 1])
    assert torch.equal(one, many)


def _given(world: LatentRows, drawn: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """The results of one row whose tokens are computed in steps of so many."""
    from srv.platform.interface import AttentionBatch

    table, outs, begin = torch.arange(1, 200, dtype=torch.int32)[None], [], 0
    for count in counts:
        plan = world.backend.plan(AttentionBatch([count], [begin + count], table))
        outs.append(world.backend.forward(world.layer, *(operand[begin : begin + count] for operand in drawn), plan))
        begin += count
    return torch.cat(outs)


@covers(
    *(f"{name}={value}" for name in (ABSORB_PREFILL, WHOLE_PREFIX) for value in ("true", "false")),
    platform="cpu",
)
def test_the_user_chooses_how_prompts_are_computed() -> None:
    """disable_mla_ragged_prefill: absorbed, with wider products. disable_chunked_prefix_cache: one chunk."""
    usual, absorbed = (products([2500, 50], **{ABSORB_PREFILL: absorb}) for absorb in (False, True))
    whole = products([2500, 50], **{WHOLE_PREFIX: True})
    assert absorbed[0] > usual[0]
    assert whole[0] == usual[0]
    assert whole[1] > 2 * usual[1]


def test_rows_of_few_queries_are_absorbed_and_long_ones_computed_once_per_key() -> None:
    """Fewer than ten queries of these sizes: 9 * (64 + 64 - 16) < 64 * 16. Products count as 2 operations."""
    few, absorbed = (products([9, 9], **{ABSORB_PREFILL: absorb})[0] for absorb in (False, True))
    assert few == absorbed
    assert products([10])[0] == 2 * 4 * 10 * (64 * 16 + 10 * (16 + 8))
    blocks = 256 * 256 + 256 * 512  # pairs of a query and a key
    assert products([512])[0] == 2 * 4 * (512 * 64 * 16 + blocks * (16 + 8))


def products(counts: list[int], **arguments: bool) -> tuple[int, int]:
    """The operations of one row with so many tokens per step, and the elements of the largest result."""
    world = rows(TorchLatentAttention, 4, LatentDims(64, 8, 8, 8), pages=200, arguments=arguments)
    with torch.inference_mode():
        for count in counts:
            assert_close(*world.step(("a", count)))
        drawn = [world.draw(sum(counts), *shape) for shape in ((4, 16), (1, 64), (1, 8))]
        with FlopCounterMode(display=False) as flops, LargestResult() as largest:  # without the reference
            _given(world, drawn, counts)
    return flops.get_total_flops(), largest.elements


class LargestResult(TorchDispatchMode):
    """The largest result of an operator, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result
