"""A simulated NPU: the API of `torch.npu`, on top of `srv.testing.simulated_device`.

    accelerator   `torch.npu` and `install()`
    graph         capture, replay, update

torch_npu's operators are in `srv_npu_simulator.operators`.
"""

from srv_npu_simulator.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "install"]
