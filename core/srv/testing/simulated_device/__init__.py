"""A simulated accelerator on PyTorch's PrivateUse1 backend, in Python: for tests and examples.

    accelerator   `torch.<name>`, and `install`, which registers it once per process
    kernels       every operator of PyTorch, run by the host's kernel on device memory
    copies        allocation, copies, reading scalars
    placement     device checks of operands
    tensors       device tensor <-> host view
    exchange      tensors of devices with an index above 0
    memory        capacity, accounting, addresses
    stream        streams and events
    deferral      the asynchronous mode: operators run when the host waits
    graphs        operators recorded once and replayed on the same storages
    launch        host functions that run as one operation of the device
    collectives   operations between the processes of several devices
    vendor        what simulated backends of vendors have in common: timed events, graphs, one card per process
    refusals      error messages

A plugin gives it a name, a capacity and, optionally, custom operators. To simulate a vendor's backend, subclass
`VendorAccelerator` and add that backend's functions. A process has one device, of a given number.
It knows no vendor and nothing of `srv`: a platform uses it like any other torch backend.

It is not part of the platform contract. Its API is stable within a minor version of `srv`, so a plugin that uses it
depends on the version that it was tested with (`srv>=0.1,<0.2`). docs/adr/0012 has the reasons.
"""

from srv.testing.simulated_device.accelerator import SimulatedAccelerator, install
from srv.testing.simulated_device.graphs import Graph, GraphMemory
from srv.testing.simulated_device.refusals import Refusals

__all__ = ["Graph", "GraphMemory", "Refusals", "SimulatedAccelerator", "install"]
