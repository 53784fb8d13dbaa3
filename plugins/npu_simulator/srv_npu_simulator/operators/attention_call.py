"""A call of npu_fused_infer_attention_score: its options, and the plan of a valid call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

UNBOUNDED = 2147483647


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The keyword arguments, with the operator's names and defaults."""

    pse_shift: Tensor | None = None
    atten_mask: Tensor | None = None
    actual_seq_lengths: Sequence[int] | None = None
    actual_seq_lengths_kv: Sequence[int] | None = None
    dequant_scale1: Tensor | None = None
    quant_scale1: Tensor | None = None
    dequant_scale2: Tensor | None = None
    quant_scale2: Tensor | None = None
    quant_offset2: Tensor | None = None
    antiquant_scale: Tensor | None = None
    antiquant_offset: Tensor | None = None
    key_antiquant_scale: Tensor | None = None
    key_antiquant_offset: Tensor | None = None
    value_antiquant_scale: Tensor | None = None
    value_antiquant_offset: Tensor | None = None
    block_table: Tensor | None = None
    query_padding_size: Tensor | None = None
    kv_padding_size: Tensor | None = None
    key_shared_prefix: Tensor | None = None
    value_shared_prefix: Tensor | None = None
    actual_shared_prefix_len: Sequence[int] | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    key_rope_antiquant_scale: Tensor | None = None
    num_heads: int = 1
    scale: float = 1.0
    pre_tokens: int = UNBOUNDED
    next_tokens: int = UNBOUNDED
    input_layout: str = "BSH"
    num_key_value_heads: int = 0
    sparse_mode: int = 0
    inner_precise: int = 0
    block_size: int = 0
    antiquant_mode: int = 0
    key_antiquant_mode: int = 0
    value_antiquant_mode: int = 0
    softmax_lse_flag: bool = False

    @property
    def latent(self) -> bool:
        """Whether this is a call for multi-head latent attention, with one rope at least."""
        return self.query_rope is not None or self.key_rope is not None


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch: `queries` query tokens and `keys` keys.

    query_start and, without pages, key_start: where they begin in the token axis of TND.
    """

    index: int
    query_start: int
    queries: int
    key_start: int
    keys: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A valid call with its shapes. `tokens`: S of the query, 0 for TND."""

    layout: str
    heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    tokens: int
    rows: tuple[Row, ...]
    output_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def query_tokens(query: Tensor, layout: str) -> int:
    """S of the query; 0 for TND, which has no S."""
    return 0 if layout == "TND" else query.shape[2 if layout == "BNSD" else 1]
