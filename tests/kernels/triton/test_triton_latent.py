"""Latent attention in Triton compared with float64; what no row may see is NaN, and so is page 0.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import random

import pytest
import torch
from every import every
from kernel_device import kernel_device
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import latent_attention
from srv_kernels.triton.attention_tuning import SPLIT_TOKENS
from srv_kernels.triton.latent_attention import LatentSizes

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(
    rows: list[tuple[int, int]], heads: int, latent: int, rope: int, page: int, dtype: torch.dtype, splits: int = 1
) -> tuple[Tensor, Tensor]:
    """The operator's results and those of float64 for rows of (query, KV) lengths."""
    generator = torch.Generator().manual_seed(7)
    needed = [-(-length // page) for _, length in rows]
    free = random.Random(1).sample(range(1, sum(needed) + 4), sum(needed))
    latents = torch.full((sum(needed) + 4, page, latent), float("nan"), dtype=dtype)
    ropes = torch.full((sum(needed) + 4, page, rope), float("nan"), dtype=dtype)
    table = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32)
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens, heads, latent + rope, generator=generator).to(dtype)
    expected, starts = [], [0]
    for number, (queries, length) in enumerate(rows):
        pages = torch.tensor([free.pop() for _ in range(needed[number])])
        table[number, : len(pages)] = pages
        vectors = torch.randn(length, latent + rope, generator=generator).to(dtype)
        at = pages[torch.arange(length) // page], torch.arange(length) % page
        latents[at], ropes[at] = vectors[:, :latent], vectors[:, latent:]
        row_queries = q[starts[-1] : starts[-1] + queries].double()
        scores = torch.einsum("qhd,kd->hqk", row_queries, vectors.double()) * 0.1
        hidden = torch.arange(length) > torch.arange(length - queries, length)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hqk,kd->qhd", weights, vectors[:, :latent].double()))
        starts.append(starts[-1] + queries)
    most = 1 << (max(queries for queries, _ in rows) - 1).bit_length()
    sizes = LatentSizes(16, 16, 4, 1)
    out = torch.full((tokens, heads, latent), float("nan"), dtype=dtype)
    parts = (len(rows) * most, heads, splits)
    operands = [
        q[..., :latent], q[..., latent:], latents, ropes, table, torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for _, length in rows], dtype=torch.int32), out,
    ]  # fmt: skip
    operands = [tensor.to(DEVICE) for tensor in operands]
    workspaces = torch.empty((*parts, latent), device=DEVICE), torch.empty(parts, device=DEVICE)
    latent_attention.paged_latent(*operands, 0.1, most, splits, list(sizes), *workspaces)
    return operands[-1].cpu(), torch.cat(expected)


def check(*arguments: object, dtype: torch.dtype, splits: int = 1) -> None:
    got, expected = attend(*arguments, dtype, splits)  # type: ignore[arg-type]
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2g}"


@every("dtype", list(TOLERANCE))
def test_prompts_and_output_in_one_step(dtype: torch.dtype) -> None:
    """Heads that are no power of two, so that tiles divide a query's heads; one and several tokens per page."""
    check([(1, 1), (5, 20), (1, 33), (9, 9)], 6, 32, 16, 4, dtype=dtype)
    check([(3, 18), (2, 5)], 20, 48, 8, 1, dtype=dtype)


def test_the_keys_of_long_rows_are_divided_and_merged() -> None:
    """A row with many parts, one with fewer keys than a part has, and one that ends after a part's first key."""
    rows = [(1, 3 * SPLIT_TOKENS + 7), (1, 5), (1, SPLIT_TOKENS + 1)]
    check(rows, 5, 32, 16, 16, dtype=torch.float32, splits=4)


def test_rows_in_page_0_get_zeros() -> None:
    arguments = [torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), torch.full((2, 4, 16), float("nan"))]
    arguments += [torch.full((2, 4, 16), float("nan")), torch.zeros(2, 2, dtype=torch.int32)]
    arguments += [torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32), torch.ones(2, 3, 16)]
    arguments = [argument.to(DEVICE) for argument in arguments]
    unused = torch.empty(1, device=DEVICE), torch.empty(1, device=DEVICE)
    latent_attention.paged_latent(*arguments, 1.0, 1, 1, [16, 16, 4, 1], *unused)
    assert not arguments[-1].any()
