"""Paged attention in Triton compared with float64. What no row may see is NaN in every pool, and so is page 0.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import has_dtype, kernel_device
from torch import Tensor

from srv_kernels import oracles

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import attention  # noqa: F401  registers the operators
from srv_kernels.triton.attention_plan import DecodePlan, Heads, Splits, extend_blocks, plan_decode
from srv_kernels.triton.attention_tuning import MOST_SPLITS, SPLIT_TOKENS, Blocks

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")

OPS = torch.ops.srv_triton
BLOCKS = Blocks(rows=16, keys=16, warps=4, stages=2)  # several tiles and blocks even in short rows
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Rows = Sequence[tuple[int, int]]  # query and KV length of each row
DRAFTS = [(1, 1), (3, 20), (8, 40), (5, 5), (2, 70)]


def quantized(plain: Tensor, kind: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """A pool, its scales, and the numbers that they stand for. `kind` is a dtype, "codes", or one of both per token."""
    name, _, per_token = kind.partition(" per ")
    if name == "int8":  # each vector's scale is beside its elements
        scale = plain.abs().amax(-1, keepdim=True) / 127
        elements = (plain / scale).nan_to_num().round().to(torch.int8)
        together = torch.cat((elements, scale.contiguous().view(torch.int8)), -1)
        dim = plain.shape[-1]
        return together[..., :dim], together.view(torch.float32)[..., dim // 4], elements * scale.double()
    if not name.startswith(("float8", "codes")):
        pool = plain.to(getattr(torch, name))
        return pool, None, pool.double()
    scale = plain.abs().amax(-1) / 300 if per_token else torch.tensor([0.25])
    factors = scale[..., None] if per_token else scale
    pool = (plain / factors).to(torch.float8_e4m3fn if name == "codes" else getattr(torch, name))
    return pool.view(torch.uint8) if name == "codes" else pool, scale, pool.double() * factors.double()


class World:
    """Random rows over a pool; `want` is the float64 result. After it is computed, hidden tokens become NaN."""

    def __init__(
        self,
        rows: Rows,
        *,
        heads: tuple[int, int] = (2, 1),
        dims: tuple[int, int] = (32, 32),
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        pool: str | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        temperature_from: int | None = None,
        sinks: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.rows, self.page_size, self.window, self.chunk, self.soft_cap = rows, page_size, window, chunk, soft_cap
        self.temperature_from = temperature_from
        self.sinks = None if sinks is None else [sinks[head % len(sinks)] for head in range(heads[0])]
        self.heads, self.scale = Heads(*heads, *dims, dtype.itemsize), 1.5 * dims[0] ** -0.5
        kind = pool or str(dtype).removeprefix("torch.")
        counts = [-(-length // page_size) for _, length in rows]
        ids = iter((torch.randperm(sum(counts) + 2) + 1).tolist())
        self.table = torch.zeros(len(rows), max(counts, default=0) + 2, dtype=torch.int32)
        plain = [torch.full((sum(counts) + 3, page_size, heads[1], dim), torch.nan) for dim in dims]
        for row, (_, length) in enumerate(rows):
            self.table[row, : counts[row]] = torch.tensor([next(ids) for _ in range(counts[row])])
            for tensor in plain:
                tensor[self._slots(row, length)] = torch.randn(length, *tensor.shape[2:])
        tokens = sum(queries for queries, _ in rows)
        # As part of a fused projection, q is not contiguous.
        self.q = torch.randn(tokens, heads[0] + 3, dims[0]).to(dtype)[:, : heads[0]]
        self.starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
        self.lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        self.plain, self.kind = plain, kind
        self.want = self.oracle(rows)
        self._hide()

    def oracle(self, rows: Rows) -> Tensor:
        if not rows:
            return torch.zeros(0, self.heads.heads, self.heads.value_dim, dtype=torch.float64)
        keys, values = (quantized(tensor, self.kind)[2] for tensor in self.plain)
        lens = [queries for queries, _ in rows], [length for _, length in rows]
        options = {"soft_cap": self.soft_cap, "chunk": self.chunk, "sinks": self.sinks}
        options["temperature_from"] = self.temperature_from
        return oracles.paged_attention(self.q, keys, values, self.table, *lens, self.scale, self.window, **options)

    def _slots(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(length)
        return self.table[row, at // self.page_size].long(), at % self.page_size

    def _hide(self) -> None:
        """Tokens hidden from a row's first query become NaN; pages of such tokens only, any other page."""
        for row, (queries, length) in enumerate(self.rows):
            first = length - queries
            behind = 0 if self.window is None else max(0, first - self.window + 1)
            behind = behind if self.chunk is None else max(behind, first // self.chunk * self.chunk)
            for tensor in self.plain:
                tensor[self._slots(row, behind)] = torch.nan
            self.table[row, : behind // self.page_size] = len(self.plain[0]) - 1 if row % 2 else 0

    def arguments(self, out: Tensor, rows: slice, lengths: Tensor | None) -> list[Any]:
        (keys, key_scale, _), (values, value_scale, _) = (quantized(tensor, self.kind) for tensor in self.plain)
        last = rows.stop and rows.stop + 1
        tensors = (self.q, keys, values, self.table[rows], self.starts[slice(rows.start, last)])
        operands = [*tensors, (self.lengths if lengths is None else lengths)[rows]]
        sinks = None if self.sinks is None else torch.tensor(self.sinks)
        others = [None if other is None else other.to(DEVICE) for other in (sinks, key_scale, value_scale)]
        scores = [self.scale, self.window, self.chunk, self.soft_cap, self.temperature_from]
        return [*(tensor.to(DEVICE) for tensor in operands), out, *scores, *others]

    def out(self) -> Tensor:
        return torch.full((*self.q.shape[:2], self.heads.value_dim), torch.nan, dtype=self.q.dtype, device=DEVICE)

    def extend(
        self, out: Tensor | None = None, rows: slice = slice(None), min_queries: int = 1, lengths: Tensor | None = None
    ) -> Tensor:
        out = self.out() if out is None else out
        OPS.paged_extend(*self.arguments(out, rows, lengths), BLOCKS, min_queries)
        return out

    def decode(
        self,
        splits: int = 1,
        out: Tensor | None = None,
        rows: slice = slice(None),
        queries: int | None = None,
        lengths: Tensor | None = None,
        least_blocks: int = 1,
    ) -> Tensor:
        out = self.out() if out is None else out
        most = max((queries_of_row for queries_of_row, _ in self.rows), default=1) if queries is None else queries
        plan = DecodePlan(most, splits, least_blocks, BLOCKS)
        partial = torch.full(plan.partial_shape(len(self.rows), self.heads), torch.nan, device=DEVICE)
        sizes = (plan.queries, plan.splits, plan.least_blocks)
        OPS.paged_decode(*self.arguments(out, rows, lengths), plan.blocks, partial, partial[..., 0].clone(), sizes)
        return out

    def check(self, got: Tensor, want: Tensor | None = None) -> None:
        tolerance = TOLERANCE[self.q.dtype]
        want = self.want if want is None else want
        torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


@every("heads", [(2, 2), (6, 2), (4, 1), (14, 2), (16, 1)])
def test_one_to_sixteen_query_heads_per_kv_head(heads: tuple[int, int]) -> None:
    world = World([(1, 20), (2, 18)], heads=heads)
    world.check(world.extend())
    world.check(world.decode(splits=2))


@every("dims", [(64, 64), (80, 80), (96, 96), (112, 112), (256, 256), (48, 32), (24, 72)])
def test_head_dims_that_are_no_power_of_two_and_values_of_another_dim(dims: tuple[int, int]) -> None:
    world = World([(5, 20)], dims=dims)
    world.check(world.extend())
    world.check(world.decode(splits=2))


@every("length", [15, 16, 17])
@every("page_size", [1, 16, 128])
def test_lengths_at_borders_of_pages(page_size: int, length: int) -> None:
    world = World([(1, length), (4, length)], page_size=page_size)
    world.check(world.extend())
    world.check(world.decode(splits=2))


@every("dtype", TOLERANCE)
def test_dtypes(dtype: torch.dtype) -> None:
    world = World([(5, 5), (2, 40)], dtype=dtype)
    world.check(world.extend())
    world.check(world.decode(splits=3))


POOLS = (
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "codes", "int8"),
    *("float8_e4m3fn per token", "codes per token"),
)


def is_testable(pool: str) -> bool:
    """Whether the target has the dtype of a pool."""
    name = pool.partition(" per ")[0]
    return name == "codes" or has_dtype(getattr(torch, name))


@every("pool", filter(is_testable, POOLS))
def test_pools_of_other_dtypes_and_their_scales(pool: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        world = World([(2, 20)], dtype=dtype, pool=pool)
        world.check(world.extend())
        world.check(world.decode(splits=2))


def test_vectors_of_very_different_magnitudes_have_scales_of_their_own() -> None:
    world = World([(1, 40)], pool="int8")
    world.plain[1][:, ::2] *= 1e-6
    world.plain[0][:, 1::2] *= 1e-6
    world.check(world.decode(splits=2), world.oracle(world.rows))
    world.check(world.extend(), world.oracle(world.rows))


@every("window", [1, 3, 16, 21])
def test_windows(window: int) -> None:
    """Shorter than a page or longer than a block; what is behind them is NaN."""
    drafts = World(DRAFTS, window=window, page_size=8)
    drafts.check(drafts.decode(splits=2))
    prompts = World([(1, 40), (20, 70), (33, 33)], window=window, heads=(1, 1), page_size=8)
    prompts.check(prompts.extend())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # tanh of a large number is 1, by way of infinity
@every("window", [None, 7])
def test_soft_cap(window: int | None) -> None:
    world = World([(1, 20), (3, 35)], soft_cap=2.0, window=window)
    world.check(world.extend())
    world.check(world.decode(splits=2))
    huge = World([(3, 20)], soft_cap=2.0)
    huge.scale = 1e6
    huge.check(huge.extend(), huge.oracle(huge.rows))


@every("soft_cap", [None, 2.0])
def test_temperature(soft_cap: float | None) -> None:
    """Queries before and behind the position from which scores grow, in one tile."""
    world = World([(1, 70), (8, 24), (2, 5)], soft_cap=soft_cap, temperature_from=18, window=40)
    world.check(world.extend())
    world.check(world.decode(splits=2))


SINKS = (0.5, -2.0, float("-inf"), 30.0, 1e4)  # of no effect, and so large that no key has a weight


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # as above
@every("options", [{}, {"window": 3}, {"window": 21, "soft_cap": 2.0}, {"dtype": torch.bfloat16, "pool": "int8"}])
def test_a_sink_counts_once_however_keys_are_divided(options: dict[str, Any]) -> None:
    drafts = World(DRAFTS, heads=(5, 1), sinks=SINKS, page_size=8, **options)
    for splits in (1, 2, 5):
        drafts.check(drafts.decode(splits))
    prompts = World([(1, 40), (20, 70), (33, 33)], heads=(5, 1), sinks=SINKS, page_size=8, **options)
    prompts.check(prompts.extend())


def test_sinks_have_no_effect_on_padding() -> None:
    world = World([(1, 33), (1, 1)], sinks=SINKS)
    world.table[1] = 0
    world.want[1] = 0
    world.check(world.decode(splits=3))
    world.check(world.extend())


@every("chunk", [1, 8, 13, 40])
def test_chunks(chunk: int) -> None:
    """What is in an earlier chunk is NaN. Rows begin and end at borders of chunks, and have several."""
    drafts = World([(1, 1), (3, 20), (8, 40), (1, 41), (1, 80)], chunk=chunk, page_size=8)
    for splits in (1, 3):
        drafts.check(drafts.decode(splits))
    prompts = World([(1, 40), (20, 70), (33, 33)], chunk=chunk, heads=(1, 1), page_size=8)
    prompts.check(prompts.extend())
    both = World([(2, 33), (20, 70)], chunk=chunk, window=9, page_size=8)
    both.check(both.extend())
    both.check(both.decode(2))


def test_long_prompts_read_whole_blocks_without_masks() -> None:
    world = World([(40, 80), (33, 33)], heads=(1, 1))
    world.check(world.extend())


def test_results_do_not_depend_on_the_number_of_splits() -> None:
    world = World(DRAFTS)
    one = world.decode(splits=1)
    world.check(one)
    for splits, least_blocks in ((2, 1), (5, 1), (16, 1), (16, 2)):
        torch.testing.assert_close(world.decode(splits, least_blocks=least_blocks), one, rtol=1e-5, atol=1e-6)


def test_a_row_of_few_splits_does_not_depend_on_how_many_there_may_be() -> None:
    """To the last bit: the sum of weights is not one over as many places as the launch has splits."""
    world = World([(1, 70), (3, 40)], page_size=8)
    few = world.decode(splits=5, least_blocks=1)
    assert torch.equal(few, world.decode(splits=40, least_blocks=1))


def test_rows_with_drafts_that_need_several_tiles() -> None:
    world = World([(8, 30), (1, 9), (7, 7)], heads=(6, 2))  # five queries fit in a tile of 16 rows
    world.check(world.decode(splits=2))


def test_lengths_are_read_on_the_device() -> None:
    """With the launch of a captured step, rows may be shorter than it was planned for."""
    world = World([(1, 40), (2, 60), (1, 17)])
    shorter = [(1, 1), (2, 33), (1, 16)]
    lengths = torch.tensor([length for _, length in shorter], dtype=torch.int32)
    world.check(world.decode(splits=4, lengths=lengths), world.oracle(shorter))
    world.check(world.extend(lengths=lengths), world.oracle(shorter))


@every("window", [None, 3])
def test_rows_of_padding_are_zero_and_change_nothing(window: int | None) -> None:
    world = World([(1, 33), (1, 1), (1, 20), (1, 1)], window=window)
    world.table[1::2] = 0
    world.want[1::2] = 0
    world.check(world.decode(splits=3))
    world.check(world.extend())


def test_mixed_steps_are_two_launches_that_skip_rows_of_the_other() -> None:
    world = World([(9, 20), (1, 40), (2, 5), (12, 12), (1, 3)])
    short = torch.tensor([queries <= 2 for queries, _ in world.rows for _ in range(queries)])
    out = world.decode(splits=2, queries=2)
    assert out.cpu()[~short].isnan().all()
    world.check(out.cpu()[short], world.want[short])
    world.check(world.extend(out, min_queries=3))
    only = world.extend(min_queries=3)
    assert only.cpu()[short].isnan().all()


def test_slices_of_rows() -> None:
    world = World([(1, 30), (2, 20), (9, 20), (6, 6)])
    out = world.decode(splits=2, rows=slice(0, 2), queries=2)
    assert out.cpu()[3:].isnan().all()
    world.check(world.extend(out, rows=slice(2, 4)))


def test_empty_steps() -> None:
    world = World([])
    assert world.extend().shape == world.decode().shape == (0, 2, 32)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=3
    ),
    heads=st.sampled_from([(2, 2), (6, 2), (5, 1)]),
    page_size=st.sampled_from((1, 4, 16, 24, 64)),
    window=st.sampled_from((None, 1, 5, 18)),
    chunk=st.sampled_from((None, None, 7, 16)),
    sinks=st.sampled_from((None, SINKS)),
    soft_cap=st.sampled_from((None, 5.0)),
    temperature_from=st.sampled_from((None, 2, 20)),
    pool=st.sampled_from((None, "int8", *filter(is_testable, ("float8_e4m3fn",)))),
    splits=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_batch(rows: Rows, splits: int, **options: Any) -> None:
    world = World(rows, **options)
    world.check(world.extend())
    world.check(world.decode(splits))


LLAMA = Heads(32, 8, 128, 128, 2)


def splits_of(rows: int, longest: int, heads: Heads = LLAMA, target: str = "sm90", queries: int = 1) -> int:
    return plan_decode(heads, rows, queries, longest, target, compute_units=132).splits


class TestPlan:
    def test_splits_fill_the_device_and_no_more(self) -> None:
        assert splits_of(rows=64, longest=32768) == splits_of(rows=32, longest=32768) == 1
        assert splits_of(rows=1, longest=32768) == 33  # times 8 KV heads: two programs per unit
        assert splits_of(rows=1, longest=32768, heads=Heads(32, 32, 128, 128, 2)) == 8

    def test_short_rows_and_windows_are_not_divided(self) -> None:
        assert splits_of(rows=1, longest=SPLIT_TOKENS) == 1
        assert splits_of(rows=1, longest=SPLIT_TOKENS + 1) == 2

    @every(("target", "most"), [("sm90", MOST_SPLITS), ("gfx942", MOST_SPLITS), ("xpu", MOST_SPLITS)])
    def test_splits_have_a_limit(self, target: str, most: int) -> None:
        assert splits_of(rows=1, longest=10**6, heads=Heads(8, 1, 128, 128, 2), target=target) == most

    def test_a_caller_may_have_a_limit_of_its_own(self) -> None:
        one_kv_head = Heads(8, 1, 128, 128, 2)
        for most in (1, 16, 100):
            assert plan_decode(one_kv_head, 1, 1, 10**6, "gfx942", 132, Splits(most)).splits == most

    @every("longest", [1, 255, 256, 257, 5000])
    def test_splits_of_one_size_suffice_for_every_length(self, longest: int) -> None:
        """They depend on the longest length alone, whatever the rows and the device."""
        plans = [
            plan_decode(LLAMA, rows, 4, longest, "sm90", units, Splits(most=2, tokens=200))
            for rows, units in ((1, 132), (64, 20))
        ]
        assert plans[0] == plans[1]
        tile = plans[0].least_blocks * plans[0].blocks.keys
        assert tile == 256  # of whole blocks
        assert plans[0].splits * tile >= longest + 3  # the keys of a window and of drafts

    def test_tiles_hold_all_heads_of_a_kv_head(self) -> None:
        assert plan_decode(LLAMA, 1, 1, 100, "sm90", 132).blocks.rows == 16
        assert plan_decode(LLAMA, 1, 8, 100, "sm90", 132).blocks.rows == 32
        assert plan_decode(Heads(71, 1, 64, 64, 2), 1, 1, 100, "sm90", 132).blocks.rows == 128
        assert extend_blocks(Heads(71, 1, 256, 256, 4), "gfx942").rows == 128

    @every(
        ("heads", "why"),
        [
            (Heads(7, 2, 64, 64, 2), "7 heads are no multiple of 2 KV heads"),
            (Heads(129, 1, 64, 64, 2), "129 query heads share a KV head, more than 128"),
            (Heads(4, 4, 64, 512, 2), "heads have 512 elements, more than 256"),
        ],
    )
    def test_layers_that_are_not_supported_have_a_reason(self, heads: Heads, why: str) -> None:
        assert heads.reasons() == [why]
        assert LLAMA.reasons() == []

    def test_a_plan_for_heads_that_are_too_large_is_refused(self) -> None:
        with pytest.raises(ValueError, match="heads of 512 elements; at most 256"):
            extend_blocks(Heads(4, 4, 512, 512, 2), "sm90")
