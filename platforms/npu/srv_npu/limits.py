"""The limits of the fused attention operator, shared by facts and code. Imports no torch.

Source: op-plugin's documentation of npu_fused_infer_attention_score.
"""

from __future__ import annotations

from srv.specs import LatentDims

KV_ORDER = "page_token_flat"  # [pages + 1, PAGE, kv_heads * dim]
PAGE = 128  # the only page size that prefill, decode and decode in graphs all support
MASK = 2048  # side of the fixed mask of the sparse modes
CAUSAL = 3  # sparse mode "right-down causal": the last query sees every key, the one before it all but one
BAND = 4  # that of a window: aligned alike, with `pre_tokens` keys before a query and `next_tokens` after it
TRAITS = ("window", "bidirectional")  # of `srv.specs.LAYER_TRAITS`
DTYPES = ("bfloat16", "float16")
# (key dim, value dim) of a head for which one call takes rows of any length (layout TND). The other layouts need equal
# key and value dims.
PACKED_DIMS = ((128, 128), (192, 128), (192, 192))
PACKED_ROWS = 4096  # rows that such a call takes
MAX_HEADS = 256
MAX_SHARING = 64  # query heads per KV head
MAX_HEAD_DIM = 512
DIM_MULTIPLE = 16
# Multi-head latent attention: the compressed vector and the rotated key of a token, and a head's key without its
# rotated part with its value, which calls with query_rope and key_rope take.
LATENT_DIM, ROPE_DIM = 512, 64
LATENT_HEAD = (128, 128)
MAX_LATENT_HEADS = 128
LATENT_QUERIES = 16  # query tokens per row that a call over compressed vectors takes


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


def window_reason(window: int, key_dim: int, value_dim: int) -> str:
    """Why the operator has no window for keys and values of different length: TND is their only layout."""
    return (
        f"keys of {key_dim} and values of {value_dim} elements with a sliding window of {window} tokens; only keys and "
        "values of equal length can have one"
    )


def latent_reasons(heads: int, dims: LatentDims) -> list[str]:
    """Why the operator cannot compute latent attention of this size; [] if it can."""
    reasons: list[str] = []
    if heads > MAX_LATENT_HEADS:
        reasons.append(f"{heads} query heads of latent attention are more than {MAX_LATENT_HEADS}")
    if (dims.latent_dim, dims.rope_dim) != (LATENT_DIM, ROPE_DIM):
        reasons.append(
            f"latent attention caches {dims.latent_dim} + {dims.rope_dim} elements per token; only {LATENT_DIM} + "
            f"{ROPE_DIM} can be read"
        )
    if (dims.key_dim, dims.value_dim) != LATENT_HEAD:
        reasons.append(
            f"keys of {dims.key_dim} and values of {dims.value_dim} elements per head of latent attention; only "
            f"{LATENT_HEAD[0]} and {LATENT_HEAD[1]} can be read"
        )
    return reasons
