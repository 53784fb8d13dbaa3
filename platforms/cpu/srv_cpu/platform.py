"""The CPU platform: host memory is device memory, and calls are synchronous."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import psutil
import torch

from srv.dist.group import RankGroup
from srv.platform.interface import Check, Communicator, Graphs, KVBuffers, Memory, MemoryUse, OpImpl
from srv.platform.manifest import EngineContext
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import pool_of, untouched_zeros
from srv.platform.streams import Streams, host_streams
from srv.specs import AttentionSpec, KVLayout
from srv_cpu.extensions import IPEX, ZENTORCH
from srv_cpu.host import resident_bytes, share_threads, threads
from srv_cpu.linear import pack
from srv_cpu.ops import OPS
from srv_cpu.packed import ORDER as PACKED_ORDER
from srv_cpu.packed import tensors as packed_tensors
from srv_cpu.probe import memory_limit
from srv_kernels.cpu.library import load

logger = logging.getLogger(__name__)

_NO_KERNELS = "Install a C++ compiler and reinstall srv-kernels, or run: python -m srv_kernels.cpu.build"


class CpuPlatform:
    """Implements `srv.platform.interface.Platform` for the machine's processors."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    @property
    def name(self) -> str:
        return "cpu"

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def init_worker(self, rank: int) -> None:
        """One thread per physical core: a second hyper-thread only adds contention. Ranks divide the cores."""
        share_threads(self._context.local_ranks, None if self._context.numa_node is None else self._context.node_ranks)
        torch.set_num_threads(threads())
        loaded = load()
        if loaded.library is None:
            logger.warning("the native CPU kernels are not used, torch's operators are: %s", loaded.reason)
        else:
            loaded.library.srv_set_threads(threads())

    def memory(self, device: torch.device) -> Memory:
        """free: what the operating system can provide without swapping, within the container's limit.

        Each rank on this host has an equal share of both.
        """
        ranks = self._context.local_ranks
        total = memory_limit() // ranks
        used = psutil.Process().memory_info().rss
        free = min(psutil.virtual_memory().available // ranks, max(total - used, 0))
        return Memory(free=free, total=total)

    def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
        """What is resident, without pages of files, which the system can drop.

        It has no peak of steps: pages of the KV pool become resident as they are written to.
        """
        return MemoryUse(resident_bytes(), None)

    def streams(self, device: torch.device) -> Streams:
        return host_streams()

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        copy_page_runs(source, target, pages)

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """A pool that takes physical memory only as it is written to."""
        packed = isinstance(layout.group, AttentionSpec) and layout.order == PACKED_ORDER
        shapes = packed_tensors(layout, pages) if packed else layout.plain_tensors(pages)
        return pool_of(layout, shapes, untouched_zeros)

    @property
    def ops(self) -> Sequence[OpImpl]:
        return OPS

    @cached_property
    def graphs(self) -> Graphs | None:
        """Captured graphs of native calls; None without the native kernels."""
        if load().library is None:
            return None
        from srv_cpu.graphs import CpuGraphs

        return CpuGraphs()

    def communicator(self, group: RankGroup) -> Communicator:
        from srv_cpu.communicator import CpuCommunicator  # imports torch.distributed, which one rank does not need

        return CpuCommunicator(group)

    def post_load(self, model: torch.nn.Module) -> None:
        """Repack weights into the layout that this machine reads fastest.

        With native kernels torch runs small operators only, and the scoring of prompts. Its OpenMP threads would spin
        in between, on the cores that the kernels' threads need; so torch gets one thread. (The `torch_native` attention
        backend raises the number again.)
        """
        packed, kernels = pack(model)
        logger.info("repacked %d weight matrices (%s)", packed, kernels)
        if packed and load().library is not None:
            torch.set_num_threads(1)

    def diagnose(self) -> list[Check]:
        device = self._context.device
        product = torch.ones(64, 64) @ torch.ones(64, 64)
        is_correct = bool((product == 64).all())
        return [
            Check("processor", True, f"{device.name}, {device.variant}, {threads()} compute threads"),
            Check("memory", True, f"{device.memory_bytes / 2**30:.1f} GiB for this process"),
            Check("native kernels", bool(load().isa), load().isa or load().reason, _NO_KERNELS),
            Check(
                "compute", is_correct, "a 64 x 64 product is correct" if is_correct else "a 64 x 64 product is wrong"
            ),
            *(check for extension in (ZENTORCH, IPEX) if (check := extension.check()) is not None),
        ]


def create(context: EngineContext) -> CpuPlatform:
    return CpuPlatform(context)
