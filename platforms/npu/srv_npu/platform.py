"""The NPU platform in one worker process, on real devices or on the simulated one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from srv.dist.group import RankGroup
from srv.errors import InternalError, PlatformUnavailable
from srv.platform.diagnosis import device_checks, verdict
from srv.platform.interface import Check, Communicator, KVBuffers, Memory, MemoryUse, OpImpl
from srv.platform.manifest import EngineContext
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import AttentionSpec, KVLayout
from srv_npu.experts import prepare_experts
from srv_npu.graphs import NpuGraphs
from srv_npu.limits import KV_ORDER
from srv_npu.ops import Operators, implementations
from srv_npu.sdk import NAME, Sdk, load_sdk, pinned
from srv_npu.weights import cast_weights

logger = logging.getLogger(__name__)


class NpuPlatform:
    """Implements `srv.platform.interface.Platform` for Ascend NPUs.

    The SDK (torch_npu or the simulator) is loaded when it is first needed, at the latest by `init_worker`, so that
    `ops` can be read without it.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._sdk: Callable[[], Sdk] = functools.cache(load_sdk)
        self._operators = Operators(self._sdk)
        self._ops = implementations(self._operators, context.device)
        self._graphs = NpuGraphs(self._sdk)

    @property
    def name(self) -> str:
        return NAME

    def device(self, index: int) -> torch.device:
        """Raises PlatformUnavailable for an index that this host does not have."""
        count = self._context.device.count
        if index >= count:
            raise PlatformUnavailable(
                NAME,
                f"device {index} is needed, but this host has {count}, numbered from 0",
                "Use fewer ranks, or check ASCEND_RT_VISIBLE_DEVICES",
                "too_few_devices",
            )
        return torch.device(NAME, index)

    def init_worker(self, rank: int) -> None:
        """Select the device, use precompiled kernels, and allow weights in the device's internal formats.

        Raises PlatformUnavailable, with reason and remedy, if the SDK cannot be loaded.
        """
        npu = self._sdk().npu
        npu.set_device(self.device(self._context.device_index))
        npu.set_compile_mode(jit_compile=False)
        npu.config.allow_internal_format = True

    def memory(self, device: torch.device) -> Memory:
        free, total = self._sdk().npu.mem_get_info(device)
        return Memory(free=free, total=total)

    def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
        npu = self._sdk().npu
        use = MemoryUse(npu.memory_allocated(device), npu.max_memory_allocated(device))
        if reset_peak:
            npu.reset_peak_memory_stats(device)
        return use

    def streams(self, device: torch.device) -> Streams:
        return accelerator_streams(self._sdk().npu, device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return pinned(self._sdk(), shape, dtype)

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        copy_page_runs(source, target, pages)

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Zeroed, so that no page holds bytes that would be read as NaN."""
        if isinstance(layout.group, AttentionSpec) and layout.order != KV_ORDER:
            raise InternalError(f"the KV pool of npu has the layout {KV_ORDER}, not {layout.order}")
        return plain_pool(layout, pages, self.device(self._context.device_index))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return self._ops

    @property
    def graphs(self) -> NpuGraphs:
        return self._graphs

    def communicator(self, group: RankGroup) -> Communicator:
        from srv_npu.communicator import join  # imports torch.distributed, which one rank does not need

        return join(self._sdk(), group, self.device(self._context.device_index))

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """With MSTX, for msprof: on the host, and outside captures also on the device. Not yet run on a real one."""
        npu = self._sdk().npu
        stream = None if npu.is_current_stream_capturing() else npu.current_stream()
        number = npu.mstx.range_start(name, stream)
        try:
            yield
        finally:
            npu.mstx.range_end(number)

    def post_load(self, model: torch.nn.Module) -> None:
        """Cast weights into the format that the matrix unit reads directly, and prepare the operands of experts."""
        logger.info("%d of %d weight matrices are in FRACTAL_NZ", *cast_weights(self._sdk(), self._operators, model))
        prepare_experts(self._operators, model)

    def diagnose(self) -> list[Check]:
        device = self.device(self._context.device_index)
        checks = device_checks(self._context.device, self.memory(device), "npu-smi info lists them")
        return [*checks, self._compute(device)]

    def _compute(self, device: torch.device) -> Check:
        """Check the results of a matmul and a norm."""
        ones = torch.ones(64, 64, dtype=torch.float16, device=device)
        norm = self._sdk().npu_rms_norm(ones @ ones, ones[0], 1e-6)[0]
        is_right = bool(((ones @ ones) == 64).all()) and bool(((norm - 1).abs() < 1e-2).all())
        remedy = "Install the CANN release that this torch_npu needs, with the kernels for this generation."
        return verdict("compute", is_right, "a 64 x 64 matmul and its norm are", remedy)


def create(context: EngineContext) -> NpuPlatform:
    return NpuPlatform(context)
