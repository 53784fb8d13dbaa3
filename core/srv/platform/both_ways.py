"""Attention to earlier and later tokens, with torch operators. All tokens of a row are in the step: no pool is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.kept import kept_per_object
from srv.platform.layers import missing_traits
from srv.specs import AttentionLayer

_QUERY_BLOCK = 256  # queries per masked call: bounds the mask, and the keys that a window adds


def unsupported(layer: AttentionLayer) -> str | None:
    """Why such a layer is not computed here; None if it is, or if it does not attend to later tokens."""
    return missing_traits(("window", "bidirectional", "relative_bias"), layer) if layer.bidirectional else None


def attend_both_ways(
    layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, begins: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Shapes as in `srv.platform.interface.AttentionBackend.forward`.

    begins: of the rows in the token axis, and the end. lengths: of the sequences, which have to be whole rows. With a
    window, a block of queries reads the keys that one of them sees.
    """
    if [end - begin for begin, end in pairwise(begins)] != list(lengths):
        raise InternalError("attention to later tokens needs whole sequences, but a row of the step is a part of one")
    group, biases = layer.heads // layer.kv_heads, None
    if layer.bias_values is not None:
        biases = _bias_table(layer.bias_values, q.dtype, q.device)
    out = q.new_empty(q.shape[0], layer.heads, v.shape[-1])
    for begin, length in zip(begins, lengths, strict=False):
        reach = length if layer.window is None else layer.window - 1
        sees_all = reach >= length - 1
        bounds = [0, length] if sees_all else [*range(0, length, _QUERY_BLOCK), length]
        for first, last in pairwise(bounds):
            key_range = range(max(0, first - reach), min(length, last + reach))
            mask = None if sees_all else _mask(range(first, last), key_range, reach, q)
            if biases is not None:
                bias = _biases(biases, range(first, last), key_range).view(layer.kv_heads, group, last - first, -1)
                mask = bias if mask is None else bias + mask
            keys = slice(begin + key_range.start, begin + key_range.stop)
            key, value = (x[keys].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
            query = q[begin + first : begin + last].view(last - first, layer.kv_heads, group, -1).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale)
            out[begin + first : begin + last] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _mask(queries: range, keys: range, reach: int, like: Tensor) -> Tensor:
    """0 where a query sees a key, else -inf: like.dtype [queries, keys], on its device."""
    rows, columns = (torch.arange(positions.start, positions.stop, device=like.device) for positions in (queries, keys))
    distance = rows[:, None] - columns
    return torch.zeros(distance.shape, dtype=like.dtype, device=like.device).masked_fill_(
        distance.abs() > reach, float("-inf")
    )


@kept_per_object
def _bias_table(values: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`AttentionLayer.bias_values` as dtype [heads, distances], on a device; all layers of a model have the same."""
    return torch.tensor(values, dtype=dtype, device=device)


def _biases(table: Tensor, queries: range, keys: range) -> Tensor:
    """Of these queries and keys: [heads, queries, keys]."""
    rows, columns = (
        torch.arange(positions.start, positions.stop, device=table.device) for positions in (queries, keys)
    )
    most = table.shape[1] // 2
    return table[:, (columns - rows[:, None]).clamp(-most, most) + most]
