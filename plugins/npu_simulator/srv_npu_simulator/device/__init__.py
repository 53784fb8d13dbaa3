"""A simulated NPU: what `torch.npu` has beside the simulated device of `srv.testing.simulated_device`.

    accelerator   `torch.npu` and `install()`
    stream        streams and events as torch_npu makes them
    graph         capture, replay, update

It knows none of torch_npu's operators: they are one level up.
"""

from srv_npu_simulator.device.accelerator import Accelerator, install

__all__ = ["Accelerator", "install"]
