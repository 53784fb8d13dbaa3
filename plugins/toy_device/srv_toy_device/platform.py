"""The toy platform in one worker process: the runtime part of the contract, member by member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from srv.dist.group import RankGroup
from srv.errors import PlatformUnavailable
from srv.platform.diagnosis import verdict
from srv.platform.interface import Check, Communicator, Graphs, KVBuffers, Memory, MemoryUse, OpImpl
from srv.platform.ops import implementations
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import AttentionSpec, KVLayout
from srv_toy_device.device import Accelerator
from srv_toy_device.facts import FACTS, KV_ORDER, OPS, VARIANT
from srv_toy_device.graphs import ToyGraphs


class ToyPlatform:
    """Implements `srv.platform.interface.Platform`. `accelerator` is `torch.toy`, already registered.

    device_index: which of the devices this worker computes on.
    """

    def __init__(self, accelerator: Accelerator, device_index: int = 0) -> None:
        self._accelerator, self._index = accelerator, device_index
        self._graphs = ToyGraphs(accelerator)
        self._ops = implementations(OPS, FACTS.profiles[VARIANT])

    @property
    def name(self) -> str:
        return "toy"

    def device(self, index: int) -> torch.device:
        """Raises PlatformUnavailable for an index that this host does not have."""
        count = self._accelerator.device_count()
        if index >= count:
            raise PlatformUnavailable(
                self.name,
                f"device {index} is needed, but this host has {count}, numbered from 0",
                "Use fewer ranks, or set SRV_TOY_DEVICES to a larger number",
                "too_few_devices",
            )
        return torch.device("toy", index)

    def init_worker(self, rank: int) -> None:
        self._accelerator.set_device(self.device(self._index))

    def memory(self, device: torch.device) -> Memory:
        free, total = self._accelerator.mem_get_info(device)
        return Memory(free=free, total=total)

    def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
        use = MemoryUse(self._accelerator.memory_allocated(), self._accelerator.max_memory_allocated())
        if reset_peak:
            self._accelerator.reset_peak_memory_stats()
        return use

    def streams(self, device: torch.device) -> Streams:
        return accelerator_streams(self._accelerator, device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._accelerator.pinned(shape, dtype)

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        copy_page_runs(source, target, pages)

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Plain tensors for every kind of cache group. Keys and values have the one order that `toy_paged` reads."""
        if isinstance(layout.group, AttentionSpec) and layout.order != KV_ORDER:
            raise ValueError(f"the KV pool of toy has the layout {KV_ORDER}, not {layout.order}")
        return plain_pool(layout, pages, self.device(self._index))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return self._ops

    @property
    def graphs(self) -> Graphs:
        return self._graphs

    def communicator(self, group: RankGroup) -> Communicator:
        """Through the simulated counterpart of a vendor's library, which a vendor's platform replaces."""
        from srv.platform.process_group import ProcessGroupCommunicator  # imports torch.distributed
        from srv_toy_device.device import make_process_group

        return ProcessGroupCommunicator(group, self.device(self._index), partial(make_process_group, self._accelerator))

    def graph_piece(self) -> AbstractContextManager[Callable[[], None]]:
        return self._graphs.piece()

    def post_load(self, model: torch.nn.Module) -> None:
        """Nothing to repack: the device reads weights as they are loaded."""

    def diagnose(self) -> list[Check]:
        device = self.device(self._index)
        memory = self.memory(device)
        product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
        is_correct = bool((product == 8).all())
        return [
            Check("device", True, self._accelerator.get_device_name()),
            Check(
                "memory",
                memory.free > 0,
                f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
                "" if memory.free > 0 else "Set SRV_TOY_MEMORY to a larger size.",
            ),
            verdict(
                "compute", is_correct, "an 8 x 8 matrix product is", "Reinstall torch, then run the plugin's own tests."
            ),
        ]
