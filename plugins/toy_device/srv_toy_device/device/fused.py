"""The device's own operators, besides PyTorch's: `torch.ops.toy`. Host functions on the device's memory.

paged_decode    one query per row over a paged KV pool; the lengths are host integers, as in Ascend's fused attention
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    *,
    lengths: Sequence[int],
    page_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last token of each row over the `lengths[row]` tokens of its pages.

    query: [rows, heads, dim]; keys, values: [slots, kv_heads, dim]; page_table: int32 [rows, columns].
    Returns [rows, heads, dim] of query's dtype; scores are float32.
    """
    if len(lengths) != query.shape[0] or max(lengths) > page_table.shape[1] * page_size:
        raise RuntimeError(f"paged_decode: lengths {list(lengths)} do not fit {query.shape[0]} rows and their pages")
    _, heads, dim = query.shape
    sharing = heads // keys.shape[1]
    out = torch.empty_like(query)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        position = torch.arange(first, length)
        slots = page_table[row, position // page_size].long() * page_size + position % page_size
        q = query[row].float().view(-1, sharing, dim)
        scores = torch.einsum("hsd,khd->hsk", q, keys[slots].float()) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[row] = torch.einsum("hsk,khd->hsd", scores.softmax(dim=-1), values[slots].float()).reshape(heads, dim)
    return out


# The shape of its result, for the asynchronous mode: that of the query.
paged_decode.meta = lambda query, *others, **options: torch.empty_like(query)  # type: ignore[attr-defined]

# By schema, as torch.library.Library.define takes it.
OPERATORS: Mapping[str, Callable[..., Tensor]] = {
    "paged_decode(Tensor query, Tensor keys, Tensor values, Tensor page_table, *, int[] lengths, int page_size,"
    " float scale, int? window=None, float? soft_cap=None) -> Tensor": paged_decode,
}
