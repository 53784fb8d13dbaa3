"""The attention backend on the native kernels of `srv_kernels.cpu`, over a packed KV pool.

Owns the calls. native/attention.cpp has the arithmetic, and `srv_cpu.packed` the shape of the pool.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv_cpu.packed import head_dim_reason
from srv_kernels.cpu.library import AttentionArgs, load
from srv_kernels.cpu.native_library import DTYPE_IDS, POOL_DTYPE_IDS

_EXTRA_POOL_DTYPE_IDS = (POOL_DTYPE_IDS[torch.float16], POOL_DTYPE_IDS[torch.int8])  # besides that of the queries


@dataclass(slots=True)
class AttentionMetadata:
    """The kernel arguments of a step that all layers share; they point into `lens`, `starts` and `table`.

    address: of `args`. lens: int32 [2, rows], query and KV lengths.
    """

    args: AttentionArgs
    address: int
    lens: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    starts: np.ndarray[tuple[int], np.dtype[np.int32]]
    table: Tensor


class NativeAttention:
    """The "native" attention backend of the CPU platform: float32 and bfloat16, head sizes that are multiples of 16.

    The pool has the queries' dtype, or float16, or int8 with a scale per token and head.
    """

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend native was built without a KV pool; it needs one")
        library = load()
        if library.library is None:
            raise InternalError(f"attention backend native was chosen without its library: {library.reason}")
        self._attend = library.library.srv_attention
        self._page_size = context.kv.layout.page_size
        self._buffers = context.kv.keys, context.kv.values  # keeps the memory behind the addresses alive
        self._keys = tuple(buffer.data_ptr() for buffer in context.kv.keys)
        self._values = tuple(buffer.data_ptr() for buffer in context.kv.values)
        self._pool = POOL_DTYPE_IDS[context.kv.keys[0].dtype]
        self._captured: dict[int, AttentionMetadata] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return head_dim_reason(layer.head_dim)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """See `srv.platform.interface.AttentionBackend`. Updates a captured step's metadata in place."""
        if batch.graph is None:
            return self._metadata(batch)
        if batch.graph not in self._captured:
            self._captured[batch.graph] = self._metadata(batch)
        metadata = self._captured[batch.graph]
        if metadata.table.data_ptr() != batch.page_table.data_ptr():
            raise InternalError(
                f"the captured step of {batch.graph} rows got another page table than it was captured with"
            )
        metadata.lens[1] = batch.kv_lens if batch.lengths is None else batch.lengths.numpy()  # the host is the device
        return metadata

    def _metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        kv_lens = batch.kv_lens if batch.lengths is None else batch.lengths.tolist()
        lens = np.array([batch.query_lens, kv_lens], dtype=np.int32)
        starts = np.zeros(lens.shape[1], dtype=np.int32)
        np.cumsum(lens[0, :-1], out=starts[1:])
        table = batch.page_table.contiguous()
        args = AttentionArgs(
            table=table.data_ptr(),
            query_lens=lens[0].ctypes.data,
            kv_lens=lens[1].ctypes.data,
            starts=starts.ctypes.data,
            rows=lens.shape[1],
            columns=table.shape[1],
            page_size=self._page_size,
            pool_type=self._pool,
        )
        return AttentionMetadata(args, ctypes.addressof(args), lens, starts, table)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        kind = DTYPE_IDS.get(q.dtype)
        if kind is None or not q.dtype == k.dtype == v.dtype or self._pool not in (kind, *_EXTRA_POOL_DTYPE_IDS):
            raise InternalError(
                f"attention backend native got queries of {q.dtype}, keys of {k.dtype} and values of {v.dtype} over a "
                f"pool of {self._buffers[0][0].dtype}; it takes float32 or bfloat16 over a pool of that type, of "
                "float16 or of int8"
            )
        q, k, v = (_plain(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        args = metadata.args
        args.q, args.k, args.v, args.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        args.keys, args.values = self._keys[layer.index], self._values[layer.index]
        args.q_stride, args.k_stride, args.v_stride = q.stride(0), k.stride(0), v.stride(0)
        args.heads, args.kv_heads, args.dim = layer.heads, layer.kv_heads, layer.head_dim
        args.scale, args.soft_cap, args.window = layer.scale, layer.soft_cap or 0.0, layer.window or 0
        self._attend(kind, metadata.address)
        return out


def _plain(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with contiguous heads."""
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        return x.contiguous()
    return x
