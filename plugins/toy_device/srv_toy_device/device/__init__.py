"""A simulated accelerator on PyTorch's PrivateUse1 backend, in Python.

    accelerator   `torch.toy` and `install()`
    kernels       every operator, by the host's kernel over the device's bytes
    copies        new memory, copies, single numbers
    placement     the rule against mixed devices, and its error
    tensors       device tensor <-> host view
    memory        capacity, accounting, addresses
    stream        what the host must wait for

It knows nothing of `srv`: the platform is one level up.
"""

from srv_toy_device.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "install"]
