"""Rows of latent attention whose keys and values the native kernel computes, against float64, per instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every import every
from latent_attention_dense import LatentRows, assert_close, latent_layer

from srv.platform.interface import AttentionBatch, BackendContext
from srv.platform.pools import plain_pool
from srv.specs import KVLayout, Latent, LatentDims
from srv_cpu.latent_forms import (
    ABSORB_PREFILL,
    DETERMINISTIC,
    PART,
    WHOLE_PREFIX,
    fewest_by_products,
    fewest_materialised,
    native_prompts,
    torch_prompts,
    why_absorbed,
)
from srv_cpu.native_latent import NativeLatentAttention
from srv_kernels.cpu.library import load

HOST = torch.device("cpu")
DEEPSEEK = LatentDims(512, 128, 64, 128)
SMALL, WIDE = LatentDims(64, 16, 16, 16), LatentDims(32, 48, 32, 16)
NOT_PACKED = LatentDims(32, 12, 16, 10)


def rows(
    heads: int,
    dims: LatentDims,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    tokens: int = 2560,
    **more: Any,
) -> LatentRows:
    """Over a pool that contains NaN wherever nothing was written. `more`: also the arguments of a user."""
    arguments = {name: more.pop(name) for name in (ABSORB_PREFILL, DETERMINISTIC, WHOLE_PREFIX) if name in more}
    group = Latent((0,), dims.latent_dim, dims.rope_dim)
    pool = plain_pool(KVLayout(group, page_size, str(dtype).removeprefix("torch.")), tokens // page_size, HOST)
    for tensor in pool.all():
        tensor.fill_(float("nan"))
    backend = NativeLatentAttention(BackendContext(None, HOST, pool, 8, None, arguments))  # type: ignore[arg-type]
    up = torch.randn(heads, dims.key_dim + dims.value_dim, dims.latent_dim, generator=torch.Generator().manual_seed(3))
    return LatentRows(latent_layer(heads, dims), backend, pool, dtype, (up * dims.latent_dim**-0.5).to(dtype), **more)


def last_step(world: LatentRows, *steps: tuple[tuple[str, int], ...]) -> torch.Tensor:
    """The results of the last of some steps."""
    with torch.inference_mode():
        return [world.step(*step)[0] for step in steps][-1]


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "page_size"),
    [
        (5, WIDE, torch.float32, 1),
        (20, SMALL, torch.bfloat16, 32),
        (3, DEEPSEEK, torch.bfloat16, 64),
        (2, DEEPSEEK, torch.float32, 16),
    ],
)
def test_long_rows_beside_short_ones_agree_with_dense_attention(
    isa: str, heads: int, dims: LatentDims, dtype: torch.dtype, page_size: int
) -> None:
    """Prompts, chunks after a cached prefix and single tokens, with tiles and blocks that are not full."""
    with torch.inference_mode():
        world = rows(heads, dims, dtype, page_size)
        for step in (
            [("a", 70), ("b", 1), ("c", 3), ("e", 2)],
            [("b", 1), ("a", 1), ("c", 66)],
            [("c", 5), ("d", 190), ("a", 33), ("b", 2)],
            [("d", 1), ("c", 1), ("b", 1), ("a", 1)],
        ):
            assert_close(*world.step(*step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_merged_wherever_they_end(isa: str, dtype: torch.dtype) -> None:
    """Within a prefix, at the end of one, and within own tokens, of which some see no key of the last part."""
    with torch.inference_mode():
        world = rows(3, SMALL, dtype, tokens=8192)
        assert_close(*world.step(("own", PART + 76), ("end", PART), ("within", PART - 24)))
        assert_close(*world.step(("own", 40), ("within", 100), ("end", 30)))
        assert_close(*world.step(("end", PART), ("within", 1)))


@pytest.mark.parametrize("magnitude", [1e-3, 40.0])
def test_scores_of_any_size_are_merged(magnitude: float) -> None:
    """Weights that hardly differ, and such that one key has nearly all of the weight, in any of the parts.

    Scores grow with the square of the magnitude, and so does their rounding, which changes weights by as much.
    """
    limit = max(2e-5, 8 * torch.finfo(torch.float32).eps * magnitude**2)
    with torch.inference_mode():
        world = rows(2, WIDE, magnitude=magnitude)
        for count in (PART + 200, 300):
            got, expected = world.step(("a", count))
            assert (got.double() - expected).abs().max() <= limit * expected.abs().max()


def test_heads_are_divided_into_groups_of_bounded_memory() -> None:
    """Products, keys and values of these 16 heads take more than the 32 MiB of a group."""
    with torch.inference_mode():
        world = rows(16, DEEPSEEK)
        assert_close(*world.step(("a", 900), ("b", 1)))
        assert_close(*world.step(("a", 260)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_result_does_not_depend_on_others_nor_on_threads(dtype: torch.dtype) -> None:
    alone, beside = rows(6, SMALL, dtype), rows(6, SMALL, dtype)
    drawn = [alone.draw(1400, *shape) for shape in ((6, 32), (1, 64), (1, 16))]
    other = [alone.draw(50, *shape) for shape in ((6, 32), (1, 64), (1, 16))]
    table = torch.arange(1, 161, dtype=torch.int32).view(2, 80).repeat(1, 2)[:, :90]
    library = load().library
    assert library is not None
    try:
        with torch.inference_mode():
            for first, count in ((0, 1100), (1100, 300)):
                mine = [operand[first : first + count] for operand in drawn]
                library.srv_set_threads(1)
                plan = alone.backend.plan(AttentionBatch([count], [first + count], table[:1]))
                expected = alone.backend.forward(alone.layer, *mine, plan)
                library.srv_set_threads(3)
                plan = beside.backend.plan(AttentionBatch([50, count], [50, first + count], table.flip(0)))
                both = (torch.cat(pair) for pair in zip(other, mine, strict=True))
                assert torch.equal(beside.backend.forward(beside.layer, *both, plan)[50:], expected)
    finally:
        library.srv_set_threads(1)


@every("prefix,queries,materialised", [
    (0, 2, True),
    (0, 200, True),
    (17, 9, True),
    (18, 8, False),
    (1000, 13, True),
    (1000, 12, False),
    (1000, 1, False),
])  # fmt: skip
def test_the_form_follows_from_the_row_alone(prefix: int, queries: int, materialised: bool) -> None:
    """q queries of k keys are materialised if 1 / q <= 1 / 13 + 1 / k; absorbed rows have the bits of absorbed ones."""
    assert fewest_materialised(SMALL, {}) == 13
    steps = [(("a", prefix),)] * bool(prefix) + [(("a", queries),)]
    usual, absorbed = (last_step(rows(4, SMALL, **{ABSORB_PREFILL: absorb}), *steps) for absorb in (False, True))
    assert torch.equal(usual, absorbed) is not materialised
    torch.testing.assert_close(usual, absorbed, rtol=1e-3, atol=1e-4)


def test_the_user_chooses_the_form_and_the_parts() -> None:
    """disable_chunked_prefix_cache: one part, and so other bits, for rows that otherwise have several."""
    for keys, same in ((PART, True), (PART + 400, False)):
        usual, whole = (
            last_step(rows(4, SMALL, **{WHOLE_PREFIX: whole_prefix}), (("a", keys),)) for whole_prefix in (False, True)
        )
        assert torch.equal(usual, whole) is same
        torch.testing.assert_close(usual, whole, rtol=1e-3, atol=1e-4)


def test_deterministic_inference_absorbs_all_rows() -> None:
    """The form depends on how many tokens of a row a step has, so that only one is left."""
    absorbed, fixed = (
        last_step(rows(4, SMALL, **{name: True}), (("a", 90),)) for name in (ABSORB_PREFILL, DETERMINISTIC)
    )
    assert torch.equal(absorbed, fixed)


def test_rows_from_which_the_products_take_less_time_are_materialised() -> None:
    """131,072 / (1.5 * 1,088 - 320) = 99.9 for DeepSeek-V3; by products alone, 131,072 / (1,088 - 320) = 170.7."""
    assert (fewest_materialised(DEEPSEEK, {}), fewest_by_products(DEEPSEEK)) == (100, 171)
    assert torch_prompts(LatentDims(64, 64, 32, 64), {}).startswith(
        "all rows attend to the compressed vectors, because"
    )
    assert native_prompts(DEEPSEEK, {}).startswith("prompts and, after a long prefix, rows of at least 100 new tokens")
    assert "for all keys of a row at once" in native_prompts(DEEPSEEK, {WHOLE_PREFIX: True})


@every("dims,arguments,reason", [
    (DEEPSEEK, {ABSORB_PREFILL: True}, "disable_mla_ragged_prefill is set"),
    (DEEPSEEK, {DETERMINISTIC: True}, "enable_deterministic_inference is set"),
    (NOT_PACKED, {}, "keys of 12 and values of 10 elements are not both multiples of 16"),
    (LatentDims(64, 480, 64, 64), {}, "keys of 544 and values of 64 elements are not both up to 512"),
    (LatentDims(16, 128, 16, 128), {}, "compressed vectors are shorter than the keys and values of a head"),
])  # fmt: skip
def test_plans_say_why_all_rows_are_absorbed(dims: LatentDims, arguments: dict[str, bool], reason: str) -> None:
    assert why_absorbed(dims, arguments) == reason
    assert fewest_materialised(dims, arguments) is None
    assert native_prompts(dims, arguments) == f"all rows attend to the compressed vectors, because {reason}"


def test_heads_that_blocks_cannot_hold_are_computed_absorbed() -> None:
    """More than 512 elements per key; and sizes that are not multiples of 16 in tests/platforms/cpu."""
    with torch.inference_mode():
        assert_close(*rows(2, LatentDims(64, 480, 64, 64)).step(("a", 150)))
