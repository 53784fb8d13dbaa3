"""The torch module of a kind of GPU and what goes with it: `torch.cuda`, `torch.xpu`, or the simulator's.

    platform   module         graphs         libraries
    cuda       torch.cuda     CUDAGraph      flashinfer
    rocm       torch.cuda     CUDAGraph      aiter        (torch's functions for AMD GPUs are those of CUDA)
    xpu        torch.xpu      XPUGraph
    any        torch.gpusim   either         stand-ins    with SRV_GPU_SIMULATOR

A platform's `create` builds one; the rest of the package uses what it is given.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from srv.errors import PlatformUnavailable
from srv_gpu.simulator import PACKAGE, simulated_variant

_LIBRARIES = ("flashinfer", "flashinfer.fused_moe", "aiter", "aiter.fused_moe", "aiter.ops.shuffle")
Pinned = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of GPU in this process.

    platform: "cuda", "rocm" or "xpu". device_type: of its torch devices. module: `torch.<device_type>`. graph_class:
    creates an empty graph. pinned: allocates page-locked host memory. libraries: by name, what imports a vendor's
    library. register_triton: makes `torch.ops.srv_triton` work on its tensors; called when the kernels are imported.
    push_range, pop_range: begin and end a range for the vendor's profiler (NVTX, ROCTX or ITT). process_group: takes
    the place of the vendor's library between ranks (`srv.platform.process_group.MakeGroup`).
    """

    platform: str
    device_type: str
    module: Any
    graph_class: Callable[[], Any]
    pinned: Pinned
    libraries: Mapping[str, Callable[[], Any]]
    register_triton: Callable[[], None]
    push_range: Callable[[str], object]
    pop_range: Callable[[], object]
    process_group: Callable[[Any], Any] | None = None

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """See `srv.platform.interface.Platform`."""
        self.push_range(name)
        try:
            yield
        finally:
            self.pop_range()

    def device(self, index: int) -> torch.device:
        return torch.device(self.device_type, index)

    def compute_units(self, device: torch.device) -> int:
        """Streaming multiprocessors, compute units or Xe cores."""
        properties = self.module.get_device_properties(device)
        for name in ("multi_processor_count", "gpu_subslice_count"):
            if hasattr(properties, name):
                return int(getattr(properties, name))
        return 1

    def library(self, name: str) -> Any:
        """The library, imported. Raises PlatformUnavailable if it cannot be."""
        try:
            return self.libraries[name]()
        except (ImportError, OSError, RuntimeError) as error:  # JIT libraries fail in their own ways
            lines = str(error).strip().splitlines()
            reason = f"{name} is installed but cannot be loaded: {lines[0] if lines else type(error).__name__}"
            remedy = "Repair its installation, or choose another backend"
            raise PlatformUnavailable(self.platform, reason, remedy, "toolkit_missing") from error


def load_accelerator(platform: str, environ: Mapping[str, str] = os.environ) -> Accelerator:
    """The accelerator of a platform. Raises PlatformUnavailable if torch was built for another, or without a GPU's."""
    variant = simulated_variant(platform, environ)
    return _real(platform) if variant is None else _simulated(platform, variant)


def _real(platform: str) -> Accelerator:
    built_for = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": torch.version.xpu}[platform]
    if built_for is None:
        remedy = "Install a torch built for it (https://pytorch.org/get-started/locally)"
        raise PlatformUnavailable(
            platform, f"torch {torch.__version__} was built without {platform}", remedy, f"torch_without_{platform}"
        )
    is_xpu = platform == "xpu"
    module: Any = torch.xpu if is_xpu else torch.cuda
    ranges: Any = torch.profiler.itt if is_xpu else torch.cuda.nvtx  # which is ROCTX in a build for AMD GPUs
    return Accelerator(
        platform=platform,
        device_type="xpu" if is_xpu else "cuda",
        module=module,
        graph_class=lambda: module.XPUGraph() if is_xpu else module.CUDAGraph(),  # torch 2.8 has no XPUGraph
        pinned=lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=True),
        libraries={name: _importer(name) for name in _LIBRARIES},
        register_triton=lambda: None,
        push_range=ranges.range_push,
        pop_range=ranges.range_pop,
    )


def _importer(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


def _simulated(platform: str, variant: str) -> Accelerator:
    simulator = importlib.import_module(PACKAGE)
    simulation = simulator.load(variant)
    module = simulation.accelerator
    ranges = module.itt if platform == "xpu" else module.nvtx
    stand_ins = {name: _part(simulation, name) for name in _LIBRARIES}
    return Accelerator(
        platform=platform,
        device_type=simulation.device_type,
        module=module,
        graph_class=module.XPUGraph if platform == "xpu" else module.CUDAGraph,
        pinned=module.pinned,
        libraries={name: _given(stand_in) for name, stand_in in stand_ins.items() if stand_in is not None},
        register_triton=lambda: simulator.register_triton_operators(module),
        push_range=ranges.range_push,
        pop_range=ranges.range_pop,
        process_group=lambda member: simulator.join_ranks(
            module, member.store, member.rank, member.size, member.timeout, member.lost
        ),
    )


def _part(simulation: Any, name: str) -> Any:
    """The stand-in for a module, by its path; None if the simulated card has none."""
    part = simulation
    for attribute in name.split("."):
        part = None if part is None else getattr(part, attribute)
    return part


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value
