"""Materialised latent attention in Triton compared with float64; keys that no row may see are NaN.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import pytest
import torch
from every import every
from kernel_device import kernel_device
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import latent_prefill
from srv_kernels.triton.latent_prefill import PrefillSizes

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = PrefillSizes(32, 32, 4, 1)
HEADS, SCALE = 2, 0.1


class Rows:
    """Rows of (query tokens, cached keys), and the float64 results of attention over the keys given so far."""

    def __init__(self, rows: list[tuple[int, int]], key: int, rope: int, value: int, dtype: torch.dtype) -> None:
        self.rows, self.rope, self.dtype = rows, rope, dtype
        self.generator = torch.Generator().manual_seed(3)
        total = sum(queries for queries, _ in rows)
        self.q = self.draw(total, HEADS, key + rope)
        self.own = self.draw(total, HEADS, key + value), self.draw(total, rope)
        self.cached = [(self.draw(keys, HEADS, key + value), self.draw(keys, rope)) for _, keys in rows]
        several = any(keys for _, keys in rows)
        self.out = torch.full((total, HEADS, value), float("nan"), dtype=torch.float32 if several else dtype)
        self.logs = torch.full((total, HEADS), float("nan")) if several else None
        self.begins = [sum(queries for queries, _ in rows[:number]) for number in range(len(rows))]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def launch(self, heads: Tensor, ropes: Tensor, segments: list[tuple[int, int, int, int]], first: bool) -> None:
        tiles = [
            (number, begin)
            for number, segment in enumerate(segments)
            for begin in range(0, segment[1] - segment[0], SIZES.rows)
        ]
        tables = (torch.tensor(table, dtype=torch.int32) for table in (segments, tiles))
        operands = [
            None if table is None else table.to(DEVICE)
            for table in (self.q, heads, ropes, *tables, self.out, self.logs)
        ]
        latent_prefill.latent_prefill(*operands, SCALE, first, list(SIZES))
        self.out = operands[5].cpu()
        self.logs = None if operands[6] is None else operands[6].cpu()

    def own_keys(self) -> None:
        ends = [begin + queries for begin, (queries, _) in zip(self.begins, self.rows, strict=True)]
        self.launch(*self.own, [(*pair, *pair) for pair in zip(self.begins, ends, strict=True)], True)

    def part(self, *pieces: tuple[int, int, int]) -> None:
        """Cached keys [begin, end) of rows. There is a vector of NaN before each piece, and after the last."""
        tensors: list[list[Tensor]] = [[], []]
        segments, at = [], 0
        for row, begin, end in pieces:
            for tensors_of_row, source in zip(tensors, self.cached[row], strict=True):
                tensors_of_row += [torch.full_like(source[:1], float("nan")), source[begin:end]]
            tokens = self.begins[row], self.begins[row] + self.rows[row][0]
            segments.append((*tokens, at + 1, at + 1 + end - begin))
            at += 1 + end - begin
        joined = [
            torch.cat([*tensors_of_row, torch.full_like(tensors_of_row[0], float("nan"))]) for tensors_of_row in tensors
        ]
        self.launch(*joined, segments, False)

    def error(self) -> float:
        """The largest, relative to the largest expected result."""
        expected = []
        for begin, (queries, cached), keys in zip(self.begins, self.rows, self.cached, strict=True):
            positions = slice(begin, begin + queries)
            heads, ropes = (torch.cat((old, new[positions])).double() for old, new in zip(keys, self.own, strict=True))
            key, value = heads.split([self.q.shape[2] - self.rope, self.out.shape[2]], -1)
            key = torch.cat((key, ropes[:, None].expand(-1, HEADS, -1)), -1)
            scores = torch.einsum("qhd,khd->hqk", self.q[positions].double(), key) * SCALE
            hidden = torch.arange(cached + queries) > torch.arange(cached, cached + queries)[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            expected.append(torch.einsum("hqk,khd->qhd", weights, value))
        wanted = torch.cat(expected)
        return float((self.out.double() - wanted).abs().max() / wanted.abs().max())


@every("dtype", list(TOLERANCE))
def test_prompts_without_cached_keys(dtype: torch.dtype) -> None:
    """Rows of one token, of less than a tile, and of several; sizes that are powers of two, and others."""
    for dims in ((32, 16, 16), (24, 8, 40)):
        rows = Rows([(1, 0), (65, 0), (17, 0), (32, 0)], *dims, dtype)
        rows.own_keys()
        assert rows.out.dtype == dtype
        assert rows.error() <= TOLERANCE[dtype]


@every("dtype", list(TOLERANCE))
def test_cached_keys_in_parts(dtype: torch.dtype) -> None:
    """Parts of one row and of several, that end at and between steps of the softmax, of one key and of none."""
    rows = Rows([(40, 50), (5, 0), (33, 16), (1, 3)], 24, 16, 40, dtype)
    rows.own_keys()
    rows.part((0, 0, 32))
    rows.part((0, 32, 49))
    rows.part((0, 49, 50), (2, 0, 16), (3, 0, 0))
    rows.part((3, 0, 3))
    assert rows.error() <= TOLERANCE[dtype]
