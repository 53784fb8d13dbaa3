"""A simulated accelerator on PyTorch's PrivateUse1 backend, in Python: for tests and examples.

    accelerator   `torch.<name>`, and `install`, which registers it: once a process, for good
    kernels       every operator of PyTorch, by the host's kernel over the device's bytes
    copies        new memory, copies, single numbers
    placement     where operands must lie
    tensors       device tensor <-> host view
    memory        capacity, accounting, addresses
    stream        what the host must wait for
    graphs        operators recorded once and replayed on the same storages
    refusals      how the device says no

A plugin gives it a name, a capacity and, if it has them, operators of its own; who stands in for a vendor's backend
subclasses `SimulatedAccelerator` and adds that backend's functions. There is one device: PyTorch's hooks for Python
report no second. It knows no vendor, and nothing of `srv`: a platform takes it as it would take any torch backend.

It is no part of the platform contract. It keeps its form within a minor version of `srv`, so a plugin that uses it
depends on the one that it was tested with (`srv>=0.1,<0.2`). docs/adr/0012 has the reasons.
"""

from srv.testing.simulated_device.accelerator import SimulatedAccelerator, install
from srv.testing.simulated_device.graphs import Graph, GraphMemory
from srv.testing.simulated_device.refusals import Refusals

__all__ = ["Graph", "GraphMemory", "Refusals", "SimulatedAccelerator", "install"]
