"""The toy platform in one worker process: the runtime part of the contract, member by member."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from srv.errors import PlatformUnavailable
from srv.platform.interface import Check, Graphs, KVBuffers, Memory, OpArgs, OpImpl
from srv.platform.page_copies import copy_page_runs
from srv.platform.pools import plain_pool
from srv.platform.streams import Streams, accelerator_streams
from srv.specs import AttentionSpec, KVLayout
from srv_toy_device.device import Accelerator
from srv_toy_device.facts import KV_ORDER
from srv_toy_device.graphs import ToyGraphs

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _supports(args: OpArgs) -> str | None:
    return None if args.dtype in _DTYPES else f"{args.dtype} is not float32, float16 or bfloat16"


# The reference functions use only PyTorch operators, and the device has all of those.
OPS = tuple(
    OpImpl(op=name, name="reference", supports_args=_supports, target=f"srv_kernels.reference:{name}")
    for name in ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "linear_w8a8", "linear_w8a8_static")
)


class ToyPlatform:
    """Implements `srv.platform.interface.Platform`. `accelerator` is `torch.toy`, already registered."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._graphs = ToyGraphs(accelerator)

    @property
    def name(self) -> str:
        return "toy"

    def device(self, local_rank: int) -> torch.device:
        """Raises PlatformUnavailable for any rank but 0: PyTorch's Python hooks support one device."""
        if local_rank != 0:
            raise PlatformUnavailable(
                self.name,
                f"rank {local_rank} needs a device of its own, but there is one",
                "Use one rank",
                "too_few_devices",
            )
        return torch.device("toy", 0)

    def init_worker(self, rank: int) -> None:
        self._accelerator.set_device(self.device(rank))

    def memory(self, device: torch.device) -> Memory:
        free, total = self._accelerator.mem_get_info(device)
        return Memory(free=free, total=total)

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
        return plain_pool(layout, pages, self.device(0))

    @property
    def ops(self) -> Sequence[OpImpl]:
        return OPS

    @property
    def graphs(self) -> Graphs:
        return self._graphs

    def post_load(self, model: torch.nn.Module) -> None:
        """Nothing to repack: the device reads weights as they are loaded."""

    def diagnose(self) -> list[Check]:
        memory = self.memory(self.device(0))
        product = torch.ones(8, 8, device=self.device(0)) @ torch.ones(8, 8, device=self.device(0))
        right = bool((product == 8).all())
        return [
            Check("device", True, self._accelerator.get_device_name()),
            Check(
                "memory",
                memory.free > 0,
                f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
                "" if memory.free > 0 else "Set SRV_TOY_MEMORY to a larger size.",
            ),
            Check(
                "compute",
                right,
                "8 x 8 matrix product is right" if right else "8 x 8 matrix product is wrong",
                "" if right else "Reinstall torch, then run the plugin's own tests.",
            ),
        ]
