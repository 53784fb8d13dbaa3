"""The accelerator, simulated. A vendor's own PyTorch backend takes the place of this folder.

    accelerator   its name, its memory, and `install()`, which registers it as `torch.toy`
    fused         its own operators, `torch.ops.toy`

Everything else of a simulated device is `srv.testing.simulated_device`, which is for tests and examples alone.
"""

from srv_toy_device.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "install"]
