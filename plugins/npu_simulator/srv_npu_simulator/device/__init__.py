"""A simulated NPU on PyTorch's PrivateUse1 backend, in Python.

    accelerator   `torch.npu` and `install()`
    kernels       PyTorch's own operators, by the host's kernel over the device's bytes
    copies        new memory, copies, single numbers
    graph         capture, replay, update
    placement     the rule against mixed devices, and its error
    tensors       device tensor <-> host view
    memory        capacity, accounting, addresses
    stream        what the host must wait for

It knows none of torch_npu's operators: they are one level up.
"""

from srv_npu_simulator.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "install"]
