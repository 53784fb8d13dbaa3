"""Triton kernels of the GPU platforms: one source for CUDA, ROCm and XPU.

    registration   every launch is an operator `torch.ops.srv_triton.*`, which graphs and simulated devices record
    numerics       dot products and rounding that are right on hardware and in Triton's interpreter

Triton is an extra (`pip install srv-kernels[triton]`). With TRITON_INTERPRET=1, set before the first import, the
operators run on host tensors in Triton's interpreter, slowly: for tests and for simulated devices.
"""
