"""A stand-in for aiter on gfx942 and gfx950: its attention over a paged cache, with aiter's arguments.

(Its mixture of experts is in `aiter_moe`.)

Reference semantics in float32 on host views. Refusals are ValueErrors, or RuntimeErrors where aiter's kernels raise.
aiter itself does not check everything that is refused here: a context longer than its partitions, a page out of range,
more queries than max_seqlen_q, would read or write wrong memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.aiter_moe import ActivationType, FusedMoe, QuantType, Shuffle
from srv_gpu_simulator.checks import FP8, FP8_FNUZ, HALVES, Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.paged_attention import Pages, Scores, attend

__all__ = ["Aiter"]

CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
LAYOUTS = ("NHD", "HND")
MAX_GROUP = 16
# Page sizes for which composable_kernel's batch prefill is compiled, and its head dims.
PREFILL_PAGES = (1, 16, 1024)
PREFILL_HEAD_DIMS = (128, 256)
DECODE_PAGES = (1, 16, 32)
_MAX_DECODE_HEAD_DIM = 256
_VECTOR_BYTES = 16
_FLOAT = 4


class Aiter:
    """The module `aiter`, for one simulated GPU."""

    __version__ = "simulated"
    ActivationType = ActivationType
    QuantType = QuantType

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.fused_moe = FusedMoe(accelerator)
        self.ops = SimpleNamespace(shuffle=Shuffle())
        # CDNA3 has the number format "fnuz", CDNA4 that of other vendors.
        self._fp8 = FP8_FNUZ if accelerator.card.key == "gfx942" else FP8

    def paged_attention_ragged(
        self,
        out: Tensor,
        workspace_buffer: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        kv_indptr: Tensor,
        kv_page_indices: Tensor,
        kv_last_page_lens: Tensor,
        block_size: int,
        max_num_partitions: int,
        alibi_slopes: None,
        kv_cache_dtype: str,
        kv_cache_layout: str,
        logits_soft_cap: float,
        k_scale: Tensor,
        v_scale: Tensor,
        fp8_out_scale: None = None,
        partition_size: int = 256,
        mtp: int = 1,
    ) -> Tensor:
        """Write the attention of one query token per sequence to `out`, and return it.

        out, query: [n, heads, D]. caches: [pages, block_size, KV heads, D] ("NHD") or [pages, KV heads, block_size, D]
        ("HND"). kv_indptr [n + 1], kv_page_indices and kv_last_page_lens [n] are int32. k_scale, v_scale: float32 [1].
        workspace_buffer: n * heads * max_num_partitions * (8 + D * size of out's dtype) bytes.
        """
        rules = Rules("paged_attention_ragged")
        for name, value in (("alibi_slopes", alibi_slopes), ("fp8_out_scale", fp8_out_scale)):
            rules.require(value is None, name, "given", "but is not simulated: pass None", NotImplementedError)
        rules.require(mtp == 1, "mtp", mtp, "only 1 is simulated", NotImplementedError)
        rules.on_device(out=out, workspace_buffer=workspace_buffer, query=query, k_scale=k_scale, v_scale=v_scale)
        rules.on_device(key_cache=key_cache, value_cache=value_cache)
        rules.on_device(kv_indptr=kv_indptr, kv_page_indices=kv_page_indices, kv_last_page_lens=kv_last_page_lens)
        rules.dims("query", query, 3)
        sequences, heads, dim = query.shape
        key, value = self._decode_caches(rules, query, key_cache, value_cache, kv_cache_layout, block_size)
        self._check_decode_types(rules, query, out, key, value, kv_cache_dtype)
        rules.shape("out", out, query.shape)
        rules.int32(kv_indptr=kv_indptr, kv_page_indices=kv_page_indices, kv_last_page_lens=kv_last_page_lens)
        rules.shape("kv_indptr", kv_indptr, (sequences + 1,))
        rules.shape("kv_last_page_lens", kv_last_page_lens, (sequences,))
        for name, one in (("k_scale", k_scale), ("v_scale", v_scale)):
            rules.dtype(name, one.dtype, (torch.float32,))
        whole = partition_size % block_size == 0
        rules.require(whole, "partition_size", partition_size, f"must be a multiple of block_size, {block_size}")
        needed = sequences * heads * max_num_partitions * (2 * _FLOAT + dim * out.element_size())
        described, rule = f"of {workspace_buffer.nbytes} bytes", f"must have at least {needed}"
        rules.require(workspace_buffer.nbytes >= needed, "workspace_buffer", described, rule)
        pages = (kv_indptr, kv_page_indices, kv_last_page_lens if block_size > 1 else None)
        longest = max_num_partitions * partition_size
        options = (block_size, longest, Scores(scale, soft_cap=logits_soft_cap))
        self._accelerator.launch(
            "aiter.paged_attention_ragged", _decode, out, query, key, value, pages, (k_scale, v_scale), options
        )
        return out

    def _decode_caches(
        self, rules: Rules, query: Tensor, key: Tensor, value: Tensor, layout: str, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """The caches as [pages, block_size, KV heads, D]."""
        rules.require(layout in LAYOUTS, "kv_cache_layout", repr(layout), "must be 'NHD' or 'HND'")
        caches = []
        for name, cache in (("key_cache", key), ("value_cache", value)):
            rules.dims(name, cache, 4)
            rules.unit_stride(**{name: cache})
            caches.append(cache if layout == "NHD" else cache.transpose(1, 2))
        rule = f"must be one of {DECODE_PAGES}"
        rules.require(block_size in DECODE_PAGES, "block_size", block_size, rule, RuntimeError)
        dim = query.shape[2]
        rule = f"must be a multiple of 64 up to {_MAX_DECODE_HEAD_DIM}"
        rules.require(dim % 64 == 0 and dim <= _MAX_DECODE_HEAD_DIM, "head size", dim, rule, RuntimeError)
        kv_heads = caches[0].shape[2]
        group = rules.heads(query.shape[1], kv_heads)
        rule = f"at most {MAX_GROUP} may share a KV head"
        rules.require(group <= MAX_GROUP, "query heads", f"{group} per KV head", rule, RuntimeError)
        for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
            rules.shape(name, cache, (caches[0].shape[0], block_size, kv_heads, dim))
        return caches[0], caches[1]

    def _check_decode_types(
        self, rules: Rules, query: Tensor, out: Tensor, key: Tensor, value: Tensor, cache_dtype: str
    ) -> None:
        rules.dtype("query", query.dtype, HALVES)
        rules.dtype("out", out.dtype, HALVES)
        rules.require(cache_dtype in CACHE_DTYPES, "kv_cache_dtype", repr(cache_dtype), f"must be in {CACHE_DTYPES}")
        allowed = query.dtype if cache_dtype == "auto" else self._fp8[1 if cache_dtype == "fp8_e5m2" else 0]
        for name, cache in (("key_cache", key), ("value_cache", value)):
            rules.dtype(name, cache.dtype, (allowed,))

    def mha_batch_prefill_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        kv_indptr: Tensor,
        kv_page_indices: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        causal: bool = False,
        window_size: tuple[int, ...] = (-1, -1),
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        out: Tensor | None = None,
        *,
        kv_last_page_lens: Tensor | None = None,
    ) -> Any:
        """[tokens, heads, D]; with return_lse also the natural log-sum-exp, float32 [heads, tokens].

        q: [tokens, heads, D]. k, v: [pages, KV heads, D], or [pages, page size, KV heads, D] with kv_last_page_lens.
        cu_seqlens_q, kv_indptr: int32 [n + 1]. window_size: keys before and after a query's position that it sees.
        """
        rules = Rules("mha_batch_prefill_func")
        for name, argument in (("alibi_slopes", alibi_slopes), ("return_attn_probs", return_attn_probs or None)):
            rules.require(argument is None, name, "given", "but is not simulated: leave it out", NotImplementedError)
        rules.require(dropout_p == 0, "dropout_p", dropout_p, "only 0 is simulated", NotImplementedError)
        rules.on_device(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, out=out)
        rules.on_device(kv_indptr=kv_indptr, kv_page_indices=kv_page_indices, kv_last_page_lens=kv_last_page_lens)
        page_size = self._check_prefill(rules, q, k, v, kv_last_page_lens)
        rules.int32(cu_seqlens_q=cu_seqlens_q, kv_indptr=kv_indptr, kv_page_indices=kv_page_indices)
        rules.int32(kv_last_page_lens=kv_last_page_lens)
        rules.shape("kv_indptr", kv_indptr, cu_seqlens_q.shape)
        key, value = (one.unsqueeze(1) if one.dim() == 3 else one for one in (k, v))
        tokens, heads, dim = q.shape
        if out is None:
            out = torch.empty((tokens, heads, value.shape[3]), dtype=q.dtype, device=q.device)
        rules.dtype("out", out.dtype, (q.dtype,))
        rules.shape("out", out, (tokens, heads, value.shape[3]))
        rules.unit_stride(out=out)
        lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device) if return_lse else None
        right = 0 if causal else window_size[1]
        scores = Scores(softmax_scale or dim**-0.5, window_size[0], right, logits_soft_cap)
        pages = (kv_indptr, kv_page_indices, kv_last_page_lens if page_size > 1 else None)
        options = (page_size, max_seqlen_q, max_seqlen_k, scores)
        launch = self._accelerator.launch
        launch("aiter.mha_batch_prefill_func", _prefill, (out, lse), q, key, value, cu_seqlens_q, pages, options)
        return (out, lse) if return_lse else out

    def _check_prefill(self, rules: Rules, q: Tensor, k: Tensor, v: Tensor, last: Tensor | None) -> int:
        """Check queries and caches; return the page size."""
        rules.dims("q", q, 3)
        rules.dtype("q", q.dtype, HALVES)
        heads, dim = q.shape[1:]
        for name, cache in (("k", k), ("v", v)):
            rules.dims(name, cache, 3, 4)
            rules.dtype(name, cache.dtype, (q.dtype,))
        rules.unit_stride(q=q, k=k, v=v)
        page_size = k.shape[1] if k.dim() == 4 else 1
        rule = f"kernels are compiled for pages of {PREFILL_PAGES}"
        rules.require(page_size in PREFILL_PAGES, "k", f"of {page_size} tokens per page", rule, RuntimeError)
        missing = page_size > 1 and last is None
        rules.require(not missing, "kv_last_page_lens", "not given", "must be given for pages of several tokens")
        rules.heads(heads, k.shape[-2])
        vector = _VECTOR_BYTES // q.element_size()
        rules.require(dim % vector == 0, "head size", dim, f"must be a multiple of {vector}", RuntimeError)
        rule = f"kernels are compiled for {PREFILL_HEAD_DIMS}"
        rules.require(dim in PREFILL_HEAD_DIMS, "head size", dim, rule, RuntimeError)
        rules.shape("k", k, (*k.shape[:-1], dim))
        rules.shape("v", v, k.shape)
        return page_size


def _decode(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, arrays: Any, scales: Any, options: tuple[int, int, Scores]
) -> None:
    block_size, longest, scores = options
    pages = Pages(*arrays, block_size)
    for row, length in enumerate(pages.lengths()):
        if length > longest:
            raise RuntimeError(
                f"paged_attention_ragged: sequence {row} has {length} tokens, but max_num_partitions * partition_size "
                f"is {longest}"
            )
        keys = pages.gather(key, row, length) * scales[0]
        values = pages.gather(value, row, length) * scales[1]
        out[row] = attend(query[row : row + 1], keys, values, scores)[0][0].to(out.dtype)


def _prefill(
    results: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, arrays: Any, options: Any
) -> None:
    out, lse = results
    page_size, most_queries, most_keys, scores = options
    pages = Pages(*arrays, page_size)
    ends = starts.tolist()
    for row, length in enumerate(pages.lengths()):
        at = slice(ends[row], ends[row + 1])
        if not 0 <= ends[row + 1] - ends[row] <= most_queries or length > most_keys:
            raise RuntimeError(
                f"mha_batch_prefill_func: sequence {row} has {ends[row + 1] - ends[row]} queries, {length} keys, but "
                f"max_seqlen_q is {most_queries} and max_seqlen_k {most_keys}"
            )
        attended, sums = attend(query[at], pages.gather(key, row, length), pages.gather(value, row, length), scores)
        out[at] = attended.to(out.dtype)
        if lse is not None:
            lse[:, at] = sums.t()
