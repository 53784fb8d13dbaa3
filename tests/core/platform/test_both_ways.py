"""Attention to earlier and later tokens on the host equals its definition, with and without a window."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from srv.errors import InternalError
from srv.models.transformers.hf_check import dense_attention
from srv.platform.both_ways import attend_both_ways, unsupported
from srv.specs import AttentionLayer

LENGTHS = [5, 1, 600]  # the last one has more queries than a block


@pytest.mark.parametrize("window", [None, 1, 4, 65, 599, 600, 1000])
@pytest.mark.parametrize(("kv_heads", "biased"), [(4, False), (2, False), (2, True)])
def test_each_row_is_attended_to_alone(window: int | None, kv_heads: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    values = tuple(map(tuple, torch.randn(4, 9, generator=generator).tolist())) if biased else None
    layer = AttentionLayer(
        0, 4, kv_heads, 16, 0.3, window=window, bidirectional=True, relative_bias=biased, bias_values=values
    )
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, heads, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    begins = [0, 5, 6, 606]
    out = attend_both_ways(layer, q, k, v, begins, LENGTHS)
    for begin, end in pairwise(begins):
        row = slice(begin, end)
        torch.testing.assert_close(out[row], dense_attention(layer, q[row], k[row], v[row]), atol=1e-5, rtol=1e-4)


def test_a_part_of_a_sequence_is_refused() -> None:
    layer = AttentionLayer(0, 1, 1, 16, 1.0, bidirectional=True)
    x = torch.zeros(3, 1, 16)
    with pytest.raises(InternalError, match="whole sequences"):
        attend_both_ways(layer, x, x, x, [0, 3], [4])


def test_layers_that_are_not_computed_are_named() -> None:
    further: tuple[dict[str, Any], ...] = ({"soft_cap": 5.0}, {"sinks": True}, {"chunk": 8}, {"alibi": (0.5,)})
    for trait in further:
        causal = AttentionLayer(0, 1, 1, 16, 1.0, **trait)
        (phrase,) = causal.traits().values()
        assert unsupported(causal) is None
        both_ways = replace(causal, window=4, bidirectional=True)
        assert unsupported(both_ways) == f"it does not support {phrase}"
    assert unsupported(AttentionLayer(0, 1, 1, 16, 1.0, window=4, bidirectional=True)) is None
