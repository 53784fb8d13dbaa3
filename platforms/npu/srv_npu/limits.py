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
