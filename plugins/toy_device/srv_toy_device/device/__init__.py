"""The simulated accelerator. A vendor already has a PyTorch backend, which replaces this folder.

    accelerator   `torch.toy`: its name, its memory, its graphs; and `install()`, which registers it
    fused         the device's own operators, `torch.ops.toy`

The rest of a simulated device is in `srv.testing.simulated_device`, which is for tests and examples; only this folder
imports it.
"""

from srv.testing.simulated_device import Graph
from srv_toy_device.device.accelerator import Accelerator, install, make_process_group

__all__ = ["Accelerator", "Graph", "install", "make_process_group"]
