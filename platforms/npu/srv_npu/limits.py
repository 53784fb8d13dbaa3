"""The limits of the fused attention operator, shared by facts and code. Imports no torch.

Source: op-plugin's documentation of npu_fused_infer_attention_score.
"""

from __future__ import annotations

KV_ORDER = "page_token_flat"  # [pages + 1, PAGE, kv_heads * dim]
PAGE = 128  # the only page size that prefill, decode and decode in graphs all support
MASK = 2048  # side of the fixed causal mask of sparse mode 3
DTYPES = ("bfloat16", "float16")
# (key dim, value dim) of a head for which one call takes rows of any length (layout TND). The other layouts need equal
# key and value dims.
PACKED_DIMS = ((128, 128), (192, 128), (192, 192))
PACKED_ROWS = 4096  # rows that such a call takes
MAX_HEADS = 256
MAX_SHARING = 64  # query heads per KV head
MAX_HEAD_DIM = 512
DIM_MULTIPLE = 16


def head_reasons(heads: int, kv_heads: int, head_dim: int) -> list[str]:
    """Why the operator cannot compute with heads of these numbers and this size; [] if it can."""
    reasons: list[str] = []
    sharing = heads // max(1, kv_heads)
    if heads > MAX_HEADS:
        reasons.append(f"{heads} query heads are more than {MAX_HEADS}")
    if sharing > MAX_SHARING:
        reasons.append(f"{sharing} query heads share one KV head; at most {MAX_SHARING} can")
    if head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {head_dim} is more than {MAX_HEAD_DIM}")
    elif head_dim % DIM_MULTIPLE:
        reasons.append(f"head_dim {head_dim} is not a multiple of {DIM_MULTIPLE}")
    return reasons
