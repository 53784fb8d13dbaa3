"""What the fused attention takes and reserves, as figures that facts and code share. Torch-free.

Source: op-plugin's page on npu_fused_infer_attention_score.
"""

from __future__ import annotations

KV_ORDER = "page_token_flat"  # [pages + 1, PAGE, kv_heads * dim]
PAGE = 128  # the one page size that prefill, decode and decode in graphs all take
MASK = 2048  # side of the fixed causal mask of sparse mode 3
DTYPES = ("bfloat16", "float16")
# Lengths of a head's keys and values for which rows of any length go in one call (layout TND). The other layouts take
# values that are as long as keys, and no others.
PACKED_DIMS = ((128, 128), (192, 128), (192, 192))
PACKED_ROWS = 4096  # rows of such a call
MAX_HEADS = 256
MAX_SHARING = 64  # query heads on one KV head
MAX_HEAD_DIM = 512
DIM_MULTIPLE = 16
