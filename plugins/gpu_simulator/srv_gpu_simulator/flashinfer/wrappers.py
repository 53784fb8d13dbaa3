"""BatchPrefillWithPagedKVCacheWrapper and BatchDecodeWithPagedKVCacheWrapper, with FlashInfer's arguments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.checks import Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.flashinfer.attention import Cache, PagedWrapper
from srv_gpu_simulator.flashinfer.page import get_seq_lens
from srv_gpu_simulator.flashinfer.planning import Problem, dtype_of


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of several query tokens per sequence over a paged cache that already has their keys."""

    kind = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        accelerator: Accelerator,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "paged_kv_indptr": paged_kv_indptr_buf,
            "paged_kv_indices": paged_kv_indices_buf,
            "paged_kv_last_page_len": paged_kv_last_page_len_buf,
        }
        super().__init__(accelerator, float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: None = None,
        packed_custom_mask: None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Prepare `run` for these sequences. Index arrays are int32, on the device or the host.

        qo_indptr, paged_kv_indptr: [n + 1]. paged_kv_last_page_len: [n]. Arrays on the host must be pinned with
        non_blocking in the asynchronous mode; those on the device make the host wait.
        """
        rules = self._rules("plan")
        _check_unsimulated(rules, pos_encoding_mode, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        arrays = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        host = self._begin_plan(arrays)
        query_type = dtype_of(q_data_type)
        fixed = self._accelerator.card.key == "sm90" and (kv_data_type is None or dtype_of(kv_data_type) is query_type)
        _check_sizes(rules, len(paged_kv_last_page_len), qo_indptr=qo_indptr, paged_kv_indptr=paged_kv_indptr)
        problem = Problem(
            query_heads=num_qo_heads,
            kv_heads=num_kv_heads,
            key_dim=head_dim_qk,
            value_dim=head_dim_vo or head_dim_qk,
            page_size=page_size,
            query_dtype=query_type,
            kv_dtype=dtype_of(kv_data_type) if kv_data_type is not None else query_type,
            output_dtype=dtype_of(o_data_type) if o_data_type is not None else query_type,
            scale=sm_scale,
            causal=causal,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
            backend=("fa3" if fixed else "fa2") if self._backend == "auto" else self._backend,
            tensor_cores=True,
            queries=_differences(rules, "qo_indptr", host["qo_indptr"]),
            keys=_keys(rules, host, page_size),
        )
        self._end_plan(problem, arrays, non_blocking, split=not disable_split_kv)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
    ) -> Any:
        """[qo_indptr[-1], heads, D]; with return_lse also the log-sum-exp to base 2, float32 [qo_indptr[-1], heads].

        A sequence without keys has the result 0.
        """
        return self._run(q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, window_left)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of one query token (or `q_len_per_req`) per sequence over a paged cache that already has its keys."""

    kind = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        accelerator: Accelerator,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "paged_kv_indptr": paged_kv_indptr_buffer,
            "paged_kv_indices": paged_kv_indices_buffer,
            "paged_kv_last_page_len": paged_kv_last_page_len_buffer,
        }
        super().__init__(accelerator, float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self._tensor_cores = use_tensor_cores
        self._planned_length: int | None = None

    @property
    def use_tensor_cores(self) -> bool:
        return self._tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Prepare `run`, as `BatchPrefillWithPagedKVCacheWrapper.plan`. Options are keywords only."""
        rules = self._rules("plan")
        _check_unsimulated(rules, pos_encoding_mode)
        arrays = {"paged_kv_indptr": indptr, "paged_kv_indices": indices, "paged_kv_last_page_len": last_page_len}
        self._check_length(rules, q_len_per_req, fixed_split_size)
        host = self._begin_plan(arrays)
        _check_sizes(rules, len(last_page_len), paged_kv_indptr=indptr)
        query_type = dtype_of(q_data_type if q_data_type is not None else data_type or "float16")
        kv_type = kv_data_type if kv_data_type is not None else data_type
        keys = _keys(rules, host, page_size)
        if q_len_per_req > 1:
            fits = min(keys) >= q_len_per_req
            rules.require(fits, "keys", min(keys), f"each sequence must have at least its {q_len_per_req} queries'")
        problem = Problem(
            query_heads=num_qo_heads,
            kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            page_size=page_size,
            query_dtype=query_type,
            kv_dtype=dtype_of(kv_type) if kv_type is not None else query_type,
            output_dtype=dtype_of(o_data_type) if o_data_type is not None else query_type,
            scale=sm_scale,
            causal=q_len_per_req > 1,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
            backend="fa2" if self._backend == "auto" else self._backend,
            tensor_cores=self._tensor_cores,
            queries=(q_len_per_req,) * len(last_page_len),
            keys=keys,
        )
        self._end_plan(problem, arrays, non_blocking, split=not disable_split_kv)
        self._planned_length = q_len_per_req

    begin_forward = plan

    def _check_length(self, rules: Rules, length: int, fixed_split_size: int | None) -> None:
        rules.require(length >= 1, "q_len_per_req", length, "must be at least 1")
        if not self._tensor_cores:
            rules.require(length == 1, "q_len_per_req", length, "needs use_tensor_cores=True")
            rules.require(fixed_split_size is None, "fixed_split_size", fixed_split_size, "needs use_tensor_cores=True")
        same = not self._graph_mode or self._planned_length in (None, length)
        rules.require(same, "q_len_per_req", length, f"the first plan of this graph had {self._planned_length}")

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
    ) -> Any:
        """[n * q_len_per_req, heads, D]; with return_lse also the log-sum-exp to base 2, float32 without D."""
        return self._run(q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, window_left)


def _check_unsimulated(rules: Rules, pos_encoding_mode: str, **absent: object) -> None:
    rules.require(pos_encoding_mode == "NONE", "pos_encoding_mode", repr(pos_encoding_mode), "only 'NONE' is simulated")
    for name, value in absent.items():
        rules.require(value is None, name, "given", "but masks are not simulated: leave it out", NotImplementedError)


def _check_sizes(rules: Rules, batch: int, **indptrs: Tensor) -> None:
    rules.require(batch > 0, "batch size", batch, "must be at least 1")
    for name, indptr in indptrs.items():
        rules.shape(name, indptr, (batch + 1,))


def _differences(rules: Rules, name: str, indptr: list[int]) -> tuple[int, ...]:
    rises = indptr[0] == 0 and all(one <= other for one, other in pairwise(indptr))
    rules.require(rises, name, indptr, "must begin with 0 and never fall")
    return tuple(other - one for one, other in pairwise(indptr))


def _keys(rules: Rules, host: dict[str, list[int]], page_size: int) -> tuple[int, ...]:
    _differences(rules, "paged_kv_indptr", host["paged_kv_indptr"])
    indptr, last = (torch.tensor(host[name]) for name in ("paged_kv_indptr", "paged_kv_last_page_len"))
    lengths = get_seq_lens(indptr, last, page_size)
    return tuple(torch.where(indptr[1:] > indptr[:-1], lengths, 0).tolist())
