"""A GPU platform in one worker process, on real devices or on a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import InternalError, PlatformUnavailable
from srv.models.layers.op_layer import op_layers
from srv.platform.diagnosis import device_checks, verdict
from srv.platform.experts import EXPERTS
from srv.platform.facts import WRITE_KV, OpCall, OpSpec
from srv.platform.interface import BackendContext, Check, Communicator, Graphs, KVBuffers, Memory, MemoryUse, OpImpl
from srv.platform.manifest import EngineContext
from srv.platform.op_choice import choose_op
from srv.platform.ops import implementations
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool, pool_of
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import SCALE_BYTES, AttentionSpec, KVLayout, TensorShape
from srv_gpu.accelerator import Accelerator
from srv_gpu.expert_specs import AITER_MOE, FLASHINFER_CUTLASS
from srv_gpu.facts import KV_ORDER, TRITON, has_package, triton_target
from srv_gpu.graphs import GpuGraphs
from srv_gpu.vendor_experts import AiterExperts, FlashInferExperts


class GpuPlatform:
    """Implements `srv.platform.interface.Platform` over an accelerator.

    specs: the ops of the platform's facts. visible_devices: the environment variable that selects devices, for
    messages. collectives: the backend of torch.distributed ("nccl", "xccl"). has_graphs: whether steps are captured.
    """

    def __init__(
        self,
        context: EngineContext,
        accelerator: Accelerator,
        *,
        specs: Sequence[OpSpec],
        visible_devices: str,
        collectives: str,
        has_graphs: bool = True,
    ) -> None:
        self._context = context
        self._accelerator = accelerator
        self._visible_devices, self._collectives = visible_devices, collectives
        self._has_triton = has_package(context.device, TRITON)
        self._experts = {
            FLASHINFER_CUTLASS: FlashInferExperts(accelerator),
            AITER_MOE: AiterExperts(accelerator),
        }
        targets = {(EXPERTS, name): expert.experts for name, expert in self._experts.items()}
        names = {(spec.op, spec.name) for spec in specs}
        self._ops = implementations(specs, context.device, {key: targets[key] for key in targets.keys() & names})
        self._captures = GpuGraphs(accelerator)
        self._graphs = self._captures if has_graphs else None
        writer = choose_op(specs, context.device, WRITE_KV, OpCall("", {})).spec
        assert writer is not None
        write_kv = _write_kv_by_triton if writer.name == TRITON else _write_kv
        self._hardware = Hardware(accelerator, triton_target(context.device.variant), write_kv, writer.name)

    @property
    def name(self) -> str:
        return self._accelerator.platform

    def device(self, index: int) -> torch.device:
        """Raises PlatformUnavailable for an index that this host does not have."""
        count = self._context.device.count
        if index >= count:
            raise PlatformUnavailable(
                self.name,
                f"device {index} is needed, but this host has {count}, numbered from 0",
                f"Use fewer ranks, or check {self._visible_devices}",
                "too_few_devices",
            )
        return self._accelerator.device(index)

    def init_worker(self, rank: int) -> None:
        """Select the device, and load Triton's kernels if Triton is installed."""
        self._accelerator.module.set_device(self.device(self._context.device_index))
        if self._has_triton:
            import srv_gpu.triton_ops

            srv_gpu.triton_ops.load(self._accelerator)

    def memory(self, device: torch.device) -> Memory:
        free, total = self._accelerator.module.mem_get_info(device)
        return Memory(free=free, total=total)

    def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
        module = self._accelerator.module
        use = MemoryUse(module.memory_allocated(device), module.max_memory_allocated(device))
        if reset_peak:
            module.reset_peak_memory_stats(device)
        return use

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
        moved = host.to(self.device(self._context.device_index), non_blocking=True)
        for read, written in zip(source.all(), target.all(), strict=True):
            torch.ops.srv_triton.copy_pages(read, written, moved)

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Zeroed, so that no page holds bytes that would be read as NaN."""
        if isinstance(layout.group, AttentionSpec) and layout.order != KV_ORDER:
            raise InternalError(f"the KV pool of {self.name} has the layout {KV_ORDER}, not {layout.order}")
        device = self.device(self._context.device_index)
        if not isinstance(layout.group, AttentionSpec) or layout.dtype != "int8":
            return plain_pool(layout, pages, device)
        return pool_of(layout, int8_tensors(layout, pages), partial(_zeros, device))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return self._ops

    @property
    def graphs(self) -> Graphs | None:
        return self._graphs

    def communicator(self, group: RankGroup) -> Communicator:
        from srv_gpu.communicator import join  # imports torch.distributed, which one rank does not need

        device = self.device(self._context.device_index)
        return join(self._collectives, group, device, self._accelerator.process_group)

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        return self._accelerator.profiler_range(name)

    def graph_piece(self) -> AbstractContextManager[Callable[[], None]]:
        return self._captures.piece()

    def post_load(self, model: torch.nn.Module) -> None:
        """Arrange the weights of experts for a vendor's library; all other kernels read weights as they are stored."""
        for layer in op_layers(model):
            if layer.op == EXPERTS and layer.implementation in self._experts:
                self._experts[layer.implementation].prepare(layer)

    def diagnose(self) -> list[Check]:
        device = self.device(self._context.device_index)
        return [
            *device_checks(self._context.device, self.memory(device)),
            self._compute(device),
            *([self._triton(device)] if self._has_triton else []),
        ]

    def _compute(self, device: torch.device) -> Check:
        ones = torch.ones(64, 64, dtype=torch.float16, device=device)
        is_right = bool(((ones @ ones) == 64).all())
        remedy = "Install a torch built for this generation of devices."
        return verdict("compute", is_right, "a 64 x 64 matmul in float16 is", remedy)

    def _triton(self, device: torch.device) -> Check:
        """Compile one small kernel, and check its result."""
        ones = torch.ones(2, 64, dtype=torch.float16, device=device)
        is_right = bool(((torch.ops.srv_triton.rms_norm(3 * ones, ones[0], 1e-6) - 1).abs() < 1e-2).all())
        return verdict(
            "triton", is_right, "a norm by Triton is", "Install the Triton release that this torch requires."
        )


def int8_tensors(layout: KVLayout, pages: int) -> dict[str, TensorShape]:
    """A layer's keys and values of int8: each page has its elements [page_size, kv_heads, dim], then their scales."""
    group: AttentionSpec = layout.group
    vectors = layout.page_size * group.kv_heads
    sizes = {"key": group.key_dim, "value": group.value_dim}
    return {name: TensorShape((pages + 1, vectors * (dim + SCALE_BYTES)), "int8") for name, dim in sizes.items()}


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the backends of a platform compute on. triton_target: whose block sizes Triton's kernels take ("sm90").

    write_kv(k, v, keys, values, slots): writes rows [tokens, kv_heads, dim] into pools [pages + 1, page_size, ...].
    kv_writer: its name in `srv_gpu.op_specs`.
    """

    accelerator: Accelerator
    triton_target: str
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    kv_writer: str


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
