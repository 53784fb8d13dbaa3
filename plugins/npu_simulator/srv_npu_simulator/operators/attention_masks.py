"""The masks that npu_fused_infer_attention_score accepts per sparse mode, and those that it silently ignores.

Releases of the documentation differ about the sparse modes of TND: all of them take 0 without a mask and 3, some also
4, or do not say. The stricter rule holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv_npu_simulator.operators.attention_call import AttentionOptions, Row, query_tokens
from srv_npu_simulator.operators.checks import Rules

MASK_SIZE = 2048


def check_mask(rules: Rules, query: Tensor, options: AttentionOptions, sequences: Sequence[Row]) -> None:
    mode, mask, layout = options.sparse_mode, options.atten_mask, options.input_layout
    rules.require(mode in range(5), "sparse_mode", mode, "must be 0 to 4")
    rule = "but TND takes 0 without a mask, and 3; use BSND one sequence at a time for another"
    rules.require(layout != "TND" or mode in (0, 3), "sparse_mode", mode, rule)
    longest = max(sequence.keys for sequence in sequences)
    one_token = query_tokens(query, layout) == 1
    if mode >= 2:
        rule = f"must be the fixed {MASK_SIZE} x {MASK_SIZE} mask for sparse_mode {mode}"
        if mask is None:
            rules.require(False, "atten_mask", "not given", rule)
        else:
            described = f"of shape {tuple(mask.shape)}"
            fixed = tuple(mask.shape[-2:]) == (MASK_SIZE, MASK_SIZE) and mask.numel() == MASK_SIZE**2
            rules.require(fixed and mask.dim() <= 4, "atten_mask", described, rule)
            rule = "must be 1 strictly above the diagonal and 0 elsewhere: torch.triu(ones, diagonal=1)"
            rules.require(_is_causal(mask), "atten_mask", "another matrix", rule)
        if mode == 4:
            _check_band(rules, options, sequences)
        cuts = mode == 2 or (mode == 4 and options.pre_tokens < longest - 1)
        rules.require(
            not (one_token and cuts), "sparse_mode", mode, "but is ignored for one query token: use a full mask"
        )
        return
    if mode == 1:
        rules.require(mask is not None, "atten_mask", "not given", "must be the full mask for sparse_mode 1")
    if mask is None or one_token:
        cut = min(options.pre_tokens, options.next_tokens) < longest
        where = "for one query token" if one_token else "without atten_mask"
        value = f"{options.pre_tokens}, with next_tokens {options.next_tokens}"
        rules.require(not cut, "pre_tokens", value, f"but is ignored {where}: use a full mask, or sparse_mode 4")
    if mask is not None:
        _check_full_mask(rules, query, options, mask, longest)


def _check_band(rules: Rules, options: AttentionOptions, sequences: Sequence[Row]) -> None:
    """A band that lies beside all scores of a sequence is refused."""
    before, after = options.pre_tokens, options.next_tokens
    rules.require(before + after >= 0, "pre_tokens", before, f"must not be less than -next_tokens, {-after}")
    least = -min(sequence.queries for sequence in sequences)
    rules.require(before > least, "pre_tokens", before, f"must be above minus the queries of each sequence, {least}")
    least = -min(sequence.keys for sequence in sequences)
    rules.require(after > least, "next_tokens", after, f"must be above minus the keys of each sequence, {least}")


def _check_full_mask(rules: Rules, query: Tensor, options: AttentionOptions, mask: Tensor, longest: int) -> None:
    layout, rows = options.input_layout, query.shape[0]
    described = f"of shape {tuple(mask.shape)}"
    if layout == "TND":
        rules.require(False, "atten_mask", described, "but TND takes a mask with sparse_mode 3 only")
    tokens = query_tokens(query, layout)
    table = options.block_table
    keys = longest if table is None else table.shape[1] * options.block_size
    wide = f"at least {keys} keys"
    if tokens == 1 and mask.dim() == 2:
        rule = f"must have shape ({rows}, keys) with {wide}"
        rules.require(mask.shape[0] == rows and mask.shape[1] >= keys, "atten_mask", described, rule)
        return
    lead = tuple(mask.shape[:-2])
    rule = f"must have shape ([{rows} or 1], [1], {tokens}, keys) with {wide}"
    fits = 2 <= mask.dim() <= 4 and mask.shape[-2] == tokens and mask.shape[-1] >= keys
    fits = fits and lead in ((), (1,), (rows,), (1, 1), (rows, 1))
    rules.require(fits, "atten_mask", described, rule)


def _is_causal(mask: Tensor) -> bool:
    """Whether this is the fixed mask. The result is cached on the tensor."""
    if not hasattr(mask, "npu_is_causal"):
        expected = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.uint8).triu_(1)
        mask.npu_is_causal = torch.equal(mask.reshape(MASK_SIZE, MASK_SIZE).view(torch.uint8), expected)  # type: ignore[attr-defined]
    return bool(mask.npu_is_causal)  # type: ignore[attr-defined]
