"""A GPU platform in one worker process, on real devices or on a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import InternalError, PlatformUnavailable
from srv.platform.interface import BackendContext, Check, Communicator, Graphs, KVBuffers, Memory, OpImpl
from srv.platform.manifest import EngineContext
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import AttentionSpec, KVLayout
from srv_gpu.accelerator import Accelerator
from srv_gpu.facts import KV_ORDER, triton_target
from srv_gpu.graphs import GpuGraphs
from srv_gpu.ops import implementations

_GIB = 1 << 30


class GpuPlatform:
    """Implements `srv.platform.interface.Platform` over an accelerator.

    visible_devices: the environment variable that selects devices, for messages. collectives: the backend of
    torch.distributed ("nccl", "xccl"). has_graphs: whether steps are captured.
    """

    def __init__(
        self,
        context: EngineContext,
        accelerator: Accelerator,
        *,
        visible_devices: str,
        collectives: str,
        has_graphs: bool = True,
    ) -> None:
        self._context = context
        self._accelerator = accelerator
        self._visible_devices, self._collectives = visible_devices, collectives
        self._has_triton = "triton" in context.device.versions
        self._ops = implementations(self._has_triton)
        self._graphs = GpuGraphs(accelerator) if has_graphs else None
        write_kv = _write_kv_by_triton if self._has_triton else _write_kv
        self._hardware = Hardware(accelerator, triton_target(context.device.variant), write_kv)

    @property
    def name(self) -> str:
        return self._accelerator.platform

    def device(self, local_rank: int) -> torch.device:
        """Raises PlatformUnavailable for a rank without a device of its own."""
        count = self._context.device.count
        if local_rank >= count:
            raise PlatformUnavailable(
                self.name,
                f"rank {local_rank} needs a device of its own, but this host has {count}",
                f"Use fewer ranks, or check {self._visible_devices}",
                "too_few_devices",
            )
        return self._accelerator.device(local_rank)

    def init_worker(self, rank: int) -> None:
        """Select the device, and load Triton's kernels if Triton is installed."""
        self._accelerator.module.set_device(self.device(self._context.local_rank))
        if self._has_triton:
            import srv_gpu.triton_ops

            srv_gpu.triton_ops.load(self._accelerator)

    def memory(self, device: torch.device) -> Memory:
        free, total = self._accelerator.module.mem_get_info(device)
        return Memory(free=free, total=total)

    def streams(self, device: torch.device) -> Streams:
        return accelerator_streams(self._accelerator.module, device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._accelerator.pinned(shape, dtype)

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        """Between pools on the device in one launch per tensor; with host memory, in runs of consecutive pages."""
        kind = self._accelerator.device_type
        on_device = all(tensor.device.type == kind for pool in (source, target) for tensor in pool.all())
        if not self._has_triton or not on_device or not pages:
            copy_page_runs(source, target, pages)
            return
        host = self.staging((len(pages), 2), torch.int64)
        host.copy_(torch.tensor(pages, dtype=torch.int64))
        moved = host.to(self.device(self._context.local_rank), non_blocking=True)
        for read, written in zip(source.all(), target.all(), strict=True):
            torch.ops.srv_triton.copy_pages(read, written, moved)

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Zeroed, so that no page holds bytes that would be read as NaN."""
        if isinstance(layout.group, AttentionSpec) and layout.order != KV_ORDER:
            raise InternalError(f"the KV pool of {self.name} has the layout {KV_ORDER}, not {layout.order}")
        return plain_pool(layout, pages, self.device(self._context.local_rank))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return self._ops

    @property
    def graphs(self) -> Graphs | None:
        return self._graphs

    def communicator(self, group: RankGroup) -> Communicator:
        from srv_gpu.communicator import join  # imports torch.distributed, which one rank does not need

        return join(self._collectives, group, self.device(self._context.local_rank))

    def post_load(self, model: torch.nn.Module) -> None:
        """Nothing to repack: kernels read weights as they are stored."""

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
                "" if memory.free > 0 else "Stop the other processes on the device.",
            ),
            self._compute(device),
            *([self._triton(device)] if self._has_triton else []),
        ]

    def _compute(self, device: torch.device) -> Check:
        ones = torch.ones(64, 64, dtype=torch.float16, device=device)
        right = bool(((ones @ ones) == 64).all())
        text = f"a 64 x 64 matmul in float16 is {'right' if right else 'wrong'}"
        return Check("compute", right, text, "" if right else "Install a torch built for this generation of devices.")

    def _triton(self, device: torch.device) -> Check:
        """Compile one small kernel, and check its result."""
        ones = torch.ones(2, 64, dtype=torch.float16, device=device)
        right = bool(((torch.ops.srv_triton.rms_norm(3 * ones, ones[0], 1e-6) - 1).abs() < 1e-2).all())
        text = f"a norm by Triton is {'right' if right else 'wrong'}"
        return Check("triton", right, text, "" if right else "Install the Triton release that this torch requires.")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the backends of a platform compute on. triton_target: whose block sizes Triton's kernels take ("cuda:90").

    write_kv(k, v, keys, values, slots): writes rows [tokens, kv_heads, dim] into pools [pages + 1, page_size, ...].
    """

    accelerator: Accelerator
    triton_target: str
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def hardware_of(context: BackendContext) -> Hardware:
    """Of the backend's platform. Raises InternalError unless that is a GPU platform."""
    if not isinstance(context.platform, GpuPlatform):
        raise InternalError(f"a backend of the GPU platforms was built for {context.platform.name}")
    return context.platform._hardware


def _write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """See `Hardware.write_kv`; with PyTorch's operators."""
    for pool, rows in ((keys, k), (values, v)):
        pool.flatten(0, 1).index_copy_(0, slots, rows.to(pool.dtype))


def _write_kv_by_triton(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """See `Hardware.write_kv`."""
    torch.ops.srv_triton.write_kv(k, v, keys, values, slots)
