"""`torch.toy`: the simulated device of `srv.testing` under this plugin's name, with its memory and operators.

`install` is called by the platform's `create`, in a worker process.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from srv.testing import simulated_device
from srv.testing.simulated_device import Graph, GraphMemory, Refusals
from srv_toy_device.device.fused import OPERATORS
from srv_toy_device.facts import DEVICE_NAME
from srv_toy_device.settings import MEMORY_VARIABLE, asynchronous, device_count, device_memory

if TYPE_CHECKING:
    from srv.platform.process_group import Membership
    from srv.testing.simulated_device.collectives import SimulatedProcessGroup

NAME = "toy"
EXHAUSTED = (
    "{device} is out of memory: tried to allocate {nbytes} bytes, but {free} of {capacity} are free. Use less memory "
    f"(a smaller batch, a smaller KV pool), or set {MEMORY_VARIABLE} to a larger size."
)


class Accelerator(simulated_device.SimulatedAccelerator):
    """`torch.toy`: one simulated device with `capacity` bytes of memory and its own operators, one of `devices`."""

    def __init__(self, capacity: int, asynchronous: bool = False, devices: int = 1) -> None:
        refusals = Refusals(f"{NAME}:0", exhausted=EXHAUSTED)
        super().__init__(
            NAME,
            capacity,
            device_name=DEVICE_NAME,
            refusals=refusals,
            operators=OPERATORS,
            asynchronous=asynchronous,
            devices=devices,
        )
        self.Graph = partial(Graph, self.deferral.enqueue)

    def graph(self, graph: Graph, memory: GraphMemory | None = None) -> AbstractContextManager[Graph]:
        """Capture this thread's operators into `graph`; graphs that share `memory` are never replayed at once."""
        if not self.recorder.busy:
            self.synchronize()
        return self.recorder.recording(graph, memory if memory is not None else self.graph_memory())

    def graph_memory(self) -> GraphMemory:
        """Memory that several graphs may share."""
        return GraphMemory(self.memory)


def make_process_group(accelerator: Accelerator, member: Membership) -> SimulatedProcessGroup:
    """The group of several devices that stands in for a vendor's library of collective operations."""
    from srv.testing.simulated_device.collectives import SimulatedProcessGroup  # imports torch.distributed

    return SimulatedProcessGroup(accelerator, member.store, member.rank, member.size, member.timeout, member.lost)


def install() -> Accelerator:
    """Register the device in this process, once and permanently, and return `torch.toy`.

    The first call reads the plugin's settings. Raises RuntimeError if another backend has claimed
    PrivateUse1.
    """
    memory, late, count = device_memory(os.environ), asynchronous(os.environ), device_count(os.environ)
    return simulated_device.install(NAME, Accelerator, lambda: Accelerator(memory, late, count))
