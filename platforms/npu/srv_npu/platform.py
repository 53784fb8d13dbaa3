"""The NPU platform in one worker process, on real devices or on the simulated one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from srv.errors import InternalError, PlatformUnavailable
from srv.platform.interface import Check, Graphs, KVBuffers, Memory, OpImpl
from srv.platform.manifest import EngineContext
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import AttentionSpec, KVLayout
from srv_npu.graphs import NpuGraphs
from srv_npu.limits import KV_ORDER
from srv_npu.ops import Operators, implementations
from srv_npu.sdk import NAME, Sdk, load_sdk, pinned
from srv_npu.weights import cast_weights

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class NpuPlatform:
    """Implements `srv.platform.interface.Platform` for Ascend NPUs.

    The SDK (torch_npu or the simulator) is loaded when it is first needed, at the latest by `init_worker`, so that
    `ops` can be read without it.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._sdk: Callable[[], Sdk] = functools.cache(load_sdk)
        self._operators = Operators(self._sdk)
        self._ops = implementations(self._operators)
        self._graphs = NpuGraphs(self._sdk)

    @property
    def name(self) -> str:
        return NAME

    def device(self, local_rank: int) -> torch.device:
        """Raises PlatformUnavailable for a rank without a device of its own."""
        count = self._context.device.count
        if local_rank >= count:
            raise PlatformUnavailable(
                NAME,
                f"rank {local_rank} needs a device of its own, but this host has {count}",
                "Use fewer ranks, or check ASCEND_RT_VISIBLE_DEVICES",
                "too_few_devices",
            )
        return torch.device(NAME, local_rank)

    def init_worker(self, rank: int) -> None:
        """Select the device, use precompiled kernels, and allow weights in the device's internal formats.

        Raises PlatformUnavailable, with reason and remedy, if the SDK cannot be loaded.
        """
        npu = self._sdk().npu
        npu.set_device(self.device(self._context.local_rank))
        npu.set_compile_mode(jit_compile=False)
        npu.config.allow_internal_format = True

    def memory(self, device: torch.device) -> Memory:
        free, total = self._sdk().npu.mem_get_info(device)
        return Memory(free=free, total=total)

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
        return plain_pool(layout, pages, self.device(self._context.local_rank))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return self._ops

    @property
    def graphs(self) -> Graphs | None:
        return self._graphs

    def post_load(self, model: torch.nn.Module) -> None:
        """Cast weights into the format that the matrix unit reads directly."""
        logger.info("%d of %d weight matrices are in FRACTAL_NZ", *cast_weights(self._sdk(), self._operators, model))

    def diagnose(self) -> list[Check]:
        facts, device = self._context.device, self.device(self._context.local_rank)
        memory = self.memory(device)
        versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
        return [
            Check("device", True, f"{facts.count} x {facts.name}, {facts.variant}"),
            Check("versions", True, versions or "none reported"),
            Check(
                "memory",
                memory.free > 0,
                f"{memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free",
                "" if memory.free > 0 else "Stop the other processes on the device (npu-smi info lists them).",
            ),
            self._compute(device),
        ]

    def _compute(self, device: torch.device) -> Check:
        """Check the results of a matmul and a norm."""
        ones = torch.ones(64, 64, dtype=torch.float16, device=device)
        norm = self._sdk().npu_rms_norm(ones @ ones, ones[0], 1e-6)[0]
        right = bool(((ones @ ones) == 64).all()) and bool(((norm - 1).abs() < 1e-2).all())
        return Check(
            "compute",
            right,
            f"a 64 x 64 matmul and its norm are {'right' if right else 'wrong'}",
            ""
            if right
            else "Install the CANN release that this torch_npu needs, with the kernels for this generation.",
        )


def create(context: EngineContext) -> NpuPlatform:
    return NpuPlatform(context)
