"""A stand-in for FlashInfer on a simulated NVIDIA GPU: the functions that the platform calls, with their names.

    attention   what both wrappers share: plan, run, fixed buffers
    wrappers    BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper
    planning    rules of `plan`, and the size of its workspace
    sampling    flashinfer.sampling
    page        append_paged_kv_cache and helpers
    fused_moe   flashinfer.fused_moe

Reference semantics in float32 on host views. It accepts what FlashInfer 0.6 and 0.7 document; arguments that it does
not know are a TypeError. Its refusals are ValueErrors, or RuntimeErrors where FlashInfer's kernels raise.
"""

from __future__ import annotations

from functools import partial

from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.flashinfer import page
from srv_gpu_simulator.flashinfer.fused_moe import FusedMoe
from srv_gpu_simulator.flashinfer.sampling import Sampling
from srv_gpu_simulator.flashinfer.wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

__all__ = ["FlashInfer"]


class FlashInfer:
    """The module `flashinfer`, for one simulated GPU."""

    __version__ = "0.6.18+simulated"

    def __init__(self, accelerator: Accelerator) -> None:
        self.BatchPrefillWithPagedKVCacheWrapper = partial(BatchPrefillWithPagedKVCacheWrapper, accelerator)
        self.BatchDecodeWithPagedKVCacheWrapper = partial(BatchDecodeWithPagedKVCacheWrapper, accelerator)
        self.append_paged_kv_cache = partial(page.append_paged_kv_cache, accelerator)
        self.get_batch_indices_positions = partial(page.get_batch_indices_positions, accelerator)
        self.get_seq_lens = page.get_seq_lens
        self.sampling = Sampling(accelerator)
        self.fused_moe = FusedMoe(accelerator)
