"""Attention to earlier and later tokens, as encoders have it, by the fused operator. No pool is read: all keys and
values of a sequence are in the step.

    all tokens see each other, TND heads     TND  [tokens, heads, dim]: one call for all sequences, without a mask
    otherwise, each sequence                 BSND [1, tokens, heads, dim], without a mask or, in windows, with a band
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionLayer
from srv_npu.limits import BAND
from srv_npu.sdk import Sdk
from srv_npu.step_rows import Ints


def whole_sequences(queries: Ints, kv_lens: list[int]) -> list[int]:
    """The ends of the rows of a step in the token axis. InternalError if one is a part of a sequence."""
    if queries.tolist() != kv_lens:
        raise InternalError("attention to later tokens needs whole sequences, but a row of the step is a part of one")
    ends: list[int] = queries.cumsum().tolist()
    return ends


class BothWays:
    """mask: the fixed one of the sparse modes. can_pack: whether TND takes the heads, and the rows of a step."""

    def __init__(self, sdk: Sdk, mask: Tensor, *, can_pack: bool) -> None:
        self._sdk = sdk
        self._mask = mask
        self._can_pack = can_pack

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
        """q [tokens, heads, dim]; k, v [tokens, kv_heads, dim]; all contiguous -> [tokens, heads, dim].

        ends: of the sequences in the token axis. A token sees `window - 1` tokens on both sides.
        """
        longest = max(end - begin for begin, end in pairwise([0, *ends]))
        if self._can_pack and (layer.window is None or layer.window >= longest):
            lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}
            packed: Tensor = self._call(layer, q, k, v, input_layout="TND", **lengths)
            return packed
        out = torch.empty_like(q)
        for begin, end in pairwise([0, *ends]):
            operands = (operand[begin:end].unsqueeze(0) for operand in (q, k, v))
            band = {} if layer.window is None or layer.window >= end - begin else self._band(layer.window - 1)
            out[begin:end] = self._call(layer, *operands, input_layout="BSND", **band)[0]
        return out

    def _band(self, reach: int) -> dict[str, Any]:
        return {"atten_mask": self._mask, "sparse_mode": BAND, "pre_tokens": reach, "next_tokens": reach}

    def _call(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out: Tensor = self._sdk.npu_fused_infer_attention_score(
            q, k, v, num_heads=layer.heads, num_key_value_heads=layer.kv_heads, scale=layer.scale, **options
        )[0]
        return out
