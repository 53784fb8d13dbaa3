"""A simulated GPU: the API of `torch.cuda` or `torch.xpu` that platforms call, on `srv.testing.simulated_device`.

accelerator   `torch.gpusim` in both forms, and `install()`
properties    what `get_device_properties` returns
stream        streams and events, and which of them belong to a capture
graph         capture and replay
launch        host functions that run as kernels of the device
"""

from srv_gpu_simulator.device.accelerator import NAME, Accelerator, CudaAccelerator, XpuAccelerator, install

__all__ = ["NAME", "Accelerator", "CudaAccelerator", "XpuAccelerator", "install"]
