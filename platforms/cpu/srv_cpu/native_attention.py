"""The attention backend on the native kernels of `srv_kernels.cpu`, over a packed KV pool.

Owns the calls. native/attention.cpp has the arithmetic, and `srv_cpu.packed` the shape of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv_cpu.latent_forms import DETERMINISTIC
from srv_cpu.native_rows import SPLIT_KEYS, UNDIVIDED, AttentionMetadata, Lens, NativeRows, Starts
from srv_cpu.packed import TRAITS, head_dim_reason
from srv_kernels.cpu.library import AttentionArgs, load
from srv_kernels.cpu.native_library import DTYPE_IDS, POOL_DTYPE_IDS

_EXTRA_POOL_DTYPE_IDS = frozenset(POOL_DTYPE_IDS.values()) - set(DTYPE_IDS.values())  # besides that of the queries


class NativeAttention(NativeRows[AttentionArgs]):
    """The "native" attention backend of the CPU platform: float32 and bfloat16, head sizes that are multiples of 16.

    The pool has the queries' dtype, or float16, or int8 with a scale per token and head, or 8-bit floats with a scale
    per layer for keys and one for values.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__()
        if context.kv is None:
            raise InternalError("attention backend native was built without a KV pool; it needs one")
        library = load()
        if library.library is None:
            raise InternalError(f"attention backend native was chosen without its library: {library.reason}")
        self._attend = library.library.srv_attention
        # Rows with several queries are not divided along their keys: without divisions at all, a token's result does
        # not depend on how many tokens of its row the step has.
        self._split_keys = UNDIVIDED if context.arguments.get(DETERMINISTIC) else SPLIT_KEYS
        self._page_size = context.kv.layout.page_size
        self._buffers = context.kv.keys, context.kv.values  # keeps the memory behind the addresses alive
        self._keys = tuple(buffer.data_ptr() for buffer in context.kv.keys)
        self._values = tuple(buffer.data_ptr() for buffer in context.kv.values)
        self._pool = POOL_DTYPE_IDS[context.kv.keys[0].dtype]
        self._scales = tuple(context.kv.scales(index) for index in range(len(self._keys)))
        self._sinks: dict[tuple[float, ...], Tensor] = {}  # kept, since captured steps contain their addresses

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return head_dim_reason(layer.head_dim) or missing_traits(TRAITS, layer)

    def make_args(self, lens: Lens, starts: Starts, table: Tensor) -> AttentionArgs:
        """See `NativeRows`."""
        return AttentionArgs(
            table=table.data_ptr(),
            query_lens=lens[0].ctypes.data,
            kv_lens=lens[1].ctypes.data,
            starts=starts.ctypes.data,
            rows=lens.shape[1],
            columns=table.shape[1],
            page_size=self._page_size,
            split_keys=self._split_keys,
            pool_type=self._pool,
        )

    def forward(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata[AttentionArgs]
    ) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        kind = DTYPE_IDS.get(q.dtype)
        if kind is None or not q.dtype == k.dtype == v.dtype or self._pool not in (kind, *_EXTRA_POOL_DTYPE_IDS):
            raise InternalError(
                f"attention backend native got queries of {q.dtype}, keys of {k.dtype} and values of {v.dtype} over a "
                f"pool of {self._buffers[0][0].dtype}; it takes float32 or bfloat16 over a pool of that type, of "
                "float16, of int8 or of 8-bit floats"
            )
        q, k, v = (_plain(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        args = metadata.args
        args.q, args.k, args.v, args.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        args.keys, args.values = self._keys[layer.index], self._values[layer.index]
        args.key_scale, args.value_scale = self._scales[layer.index]
        args.q_stride, args.k_stride, args.v_stride = q.stride(0), k.stride(0), v.stride(0)
        args.heads, args.kv_heads, args.dim = layer.heads, layer.kv_heads, layer.head_dim
        args.scale, args.soft_cap, args.window = layer.scale, layer.soft_cap or 0.0, layer.window or 0
        args.chunk, args.sinks = layer.chunk or 0, self._sinks_address(layer.sink_scores)
        args.temperature_from = layer.temperature_from or 0
        self._attend(kind, metadata.address)
        return out

    def _sinks_address(self, scores: tuple[float, ...] | None) -> int | None:
        if scores is None:
            return None
        if scores not in self._sinks:
            self._sinks[scores] = torch.tensor(scores, dtype=torch.float32)
        return self._sinks[scores].data_ptr()


def _plain(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with contiguous heads."""
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        return x.contiguous()
    return x
