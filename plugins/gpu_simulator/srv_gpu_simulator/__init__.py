"""A simulator of one NVIDIA, AMD or Intel GPU, for development only: it runs, slowly, on the CPU.

    gpu = srv_gpu_simulator.load("sm90")           # or $SRV_GPU_SIMULATOR: sm80 ... sm120, gfx942, gfx950, pvc, bmg
    x = torch.randn(4, 64).to(gpu.device_type)     # "gpusim"
    gpu.accelerator.synchronize()                  # `torch.gpusim`, in place of torch.cuda or torch.xpu
    gpu.flashinfer, gpu.aiter                      # stand-ins, None where the vendor has none
    srv_gpu_simulator.register_triton_operators(gpu.accelerator)
    srv_gpu_simulator.join_ranks(gpu.accelerator, ...)    # in place of torch.distributed's NCCL and XCCL groups

Importing this package does nothing. `load` registers the device with PyTorch permanently, for the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srv.testing.simulated_device.collectives import SimulatedProcessGroup
    from srv_gpu_simulator.aiter import Aiter
    from srv_gpu_simulator.cards import Card
    from srv_gpu_simulator.device import Accelerator
    from srv_gpu_simulator.flashinfer import FlashInfer

__all__ = ["VARIABLE", "Simulation", "join_ranks", "load", "register_triton_operators"]

VARIABLE = "SRV_GPU_SIMULATOR"
ASYNCHRONOUS_VARIABLE = "SRV_GPU_SIMULATOR_ASYNCHRONOUS"
COUNT_VARIABLE = "SRV_GPU_SIMULATOR_COUNT"


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated GPU and the libraries for it.

    accelerator: `torch.gpusim`, with the API of torch.cuda (NVIDIA, AMD) or torch.xpu (Intel). flashinfer: for NVIDIA
    GPUs, aiter: for gfx942 and gfx950; None for others.
    """

    card: Card
    accelerator: Accelerator
    flashinfer: FlashInfer | None
    aiter: Aiter | None

    @property
    def device_type(self) -> str:
        """The type of its torch devices, "gpusim"."""
        return self.accelerator.name


def load(
    card: str | None = None, *, memory: int | None = None, asynchronous: bool | None = None, count: int | None = None
) -> Simulation:
    """Simulate one GPU in this process.

    card: see `cards.CARDS`; SRV_GPU_SIMULATOR if it is left out. memory: bytes, if other than the real card's.
    asynchronous: operators run only when the host waits (`srv.testing.simulated_device.deferral`); if it is left out,
    SRV_GPU_SIMULATOR_ASYNCHRONOUS=1 says so. count: how many such GPUs the host has, of which this process uses the one
    that it selects first; SRV_GPU_SIMULATOR_COUNT, or 1. Later calls with the same arguments return the same device.
    Raises RuntimeError if there is another PrivateUse1 backend, and for a second GPU; ValueError for an unknown one.
    """
    from srv_gpu_simulator.cards import find_card

    key = card if card is not None else os.environ.get(VARIABLE, "")
    if not key:
        raise ValueError(f"the GPU simulator was given no GPU; set {VARIABLE} to one, for instance sm90")
    hardware = find_card(key)
    if asynchronous is None:
        asynchronous = os.environ.get(ASYNCHRONOUS_VARIABLE, "0") == "1"

    from srv_gpu_simulator.aiter import Aiter
    from srv_gpu_simulator.device import install
    from srv_gpu_simulator.flashinfer import FlashInfer

    if count is None:
        count = int(os.environ.get(COUNT_VARIABLE) or 1)
    accelerator = install(hardware, memory if memory is not None else hardware.memory, asynchronous, count)
    return Simulation(
        hardware,
        accelerator,
        FlashInfer(accelerator) if hardware.vendor == "nvidia" else None,
        Aiter(accelerator) if hardware.key in ("gfx942", "gfx950") else None,
    )


def register_triton_operators(accelerator: Accelerator) -> None:
    """See `triton_operators.register_triton_operators`."""
    from srv_gpu_simulator.triton_operators import register_triton_operators as register

    register(accelerator)


def join_ranks(
    accelerator: Accelerator,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    lost: Callable[[str], Exception],
) -> SimulatedProcessGroup:
    """A group in place of the libraries', whose operations are counted as launches."""
    from srv.testing.simulated_device.collectives import SimulatedProcessGroup

    return SimulatedProcessGroup(accelerator, store, rank, size, timeout, lost, accelerator.launch)
