"""Latent attention on the native kernel of `srv_kernels.cpu`, over the plain pool of compressed vectors.

Owns the calls; native/latent_attention.cpp and latent_prefill.cpp have the arithmetic. The kernel chooses the form of
each row by its own tokens alone; `srv_cpu.latent_forms` has the number of queries from which on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.specs import LATENT
from srv_cpu.latent_forms import DETERMINISTIC, PART, WHOLE_PREFIX, fewest_materialised
from srv_cpu.native_rows import SPLIT_KEYS, UNDIVIDED, AttentionMetadata, Lens, NativeRows, Starts
from srv_cpu.packed import latent_reason
from srv_kernels.cpu.library import LatentAttentionArgs, load
from srv_kernels.cpu.native_library import DTYPE_IDS


class NativeLatentAttention(NativeRows[LatentAttentionArgs]):
    """The backend of latent attention of "native": float32 or bfloat16, over a pool of the same dtype."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__()
        if context.kv is None:
            raise InternalError("attention backend native was built without a KV pool; it needs one")
        library = load()
        if library.library is None:
            raise InternalError(f"attention backend native was chosen without its library: {library.reason}")
        self._attend = library.library.srv_latent_attention
        # As for other attention: a token's result then does not depend on how its row is divided among steps.
        self._split_keys = UNDIVIDED if context.arguments.get(DETERMINISTIC) else SPLIT_KEYS
        self._arguments = context.arguments
        self._fewest: dict[int, int] = {}  # by layer: `LatentAttentionArgs.materialise_from`
        self._part = 0 if context.arguments.get(WHOLE_PREFIX) else PART
        self._page_size = context.kv.layout.page_size
        self._latents, self._ropes = context.kv.tensors["latent"], context.kv.tensors["rope"]
        self._up: dict[int, Tensor] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        reason = None if layer.latent is None else latent_reason(layer.latent.latent_dim, layer.latent.rope_dim)
        return reason or missing_traits((LATENT,), layer)

    def prepare(self, layer: AttentionLayer, up: Tensor) -> None:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        self._up[layer.index] = up.contiguous()
        fewest = None if layer.latent is None else fewest_materialised(layer.latent, self._arguments)
        self._fewest[layer.index] = fewest or 0

    def make_args(self, lens: Lens, starts: Starts, table: Tensor) -> LatentAttentionArgs:
        """See `NativeRows`."""
        return LatentAttentionArgs(
            table=table.data_ptr(),
            query_lens=lens[0].ctypes.data,
            kv_lens=lens[1].ctypes.data,
            starts=starts.ctypes.data,
            rows=lens.shape[1],
            columns=table.shape[1],
            page_size=self._page_size,
            split_keys=self._split_keys,
        )

    def forward(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata[LatentAttentionArgs]
    ) -> Tensor:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        dims, up, kind = layer.latent, self._up[layer.index], DTYPE_IDS.get(q.dtype)
        latents, ropes = self._latents[layer.index], self._ropes[layer.index]
        if dims is None or kind is None or not q.dtype == k.dtype == v.dtype == up.dtype == latents.dtype:
            raise InternalError(
                f"attention backend native got queries of {q.dtype}, compressed vectors of {k.dtype}, rotary keys of "
                f"{v.dtype} and a pool of {latents.dtype}; all must be float32, or all bfloat16"
            )
        q, k, v = q.contiguous(), _rows(k), _rows(v)
        out = torch.empty((*q.shape[:2], dims.value_dim), dtype=q.dtype)
        args = metadata.args
        args.q, args.latent, args.rope, args.up = q.data_ptr(), k.data_ptr(), v.data_ptr(), up.data_ptr()
        args.out, args.latents, args.ropes = out.data_ptr(), latents.data_ptr(), ropes.data_ptr()
        args.heads, args.latent_dim, args.key_dim = layer.heads, dims.latent_dim, dims.key_dim
        args.rope_dim, args.value_dim, args.scale = dims.rope_dim, dims.value_dim, layer.scale
        args.materialise_from, args.part_keys = self._fewest[layer.index], self._part
        args.q_stride, args.latent_stride, args.rope_stride = q.stride(0), k.stride(0), v.stride(0)
        self._attend(kind, metadata.address)
        return out


def _rows(x: Tensor) -> Tensor:
    """x [tokens, 1, dim] with contiguous vectors."""
    return x if x.stride(2) == 1 else x.contiguous()
