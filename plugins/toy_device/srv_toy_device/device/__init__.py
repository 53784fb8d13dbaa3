"""The accelerator, simulated: what a vendor has already, as a PyTorch backend, which takes the place of this folder.

    accelerator   `torch.toy`: its name, its memory, its graphs; and `install()`, which registers it
    fused         its own operators, `torch.ops.toy`

Everything else of a simulated device is in `srv.testing.simulated_device`, which is for tests and examples, and which
only this folder knows.
"""

from srv.testing.simulated_device import Graph
from srv_toy_device.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "Graph", "install"]
