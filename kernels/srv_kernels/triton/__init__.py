"""Triton kernels of the GPU platforms: one source for CUDA, ROCm and XPU.

    registration   every launch is an operator `torch.ops.srv_triton.*`, which graphs and simulated devices record
    numerics       dot products, rounding and stores that are right compiled and in Triton's interpreter
    rows           matrices of rows, and the tiles that hold one
    norms, rotary, activations, kv_write, page_copies    the kernels
    attention      paged attention, with attention_kernels, attention_reduce, attention_plan (splits, workspaces),
                   attention_tuning (block sizes per target) and attention_variants
    variants       what a kernel is compiled as ahead of time; each module with kernels has a tuple VARIANTS
    targets        the GPUs that it is compiled for
    compile        compiles all variants for all targets without a GPU, and keeps compiled.json
    compile_worker its processes

Triton is an extra (`pip install srv-kernels[triton]`). With TRITON_INTERPRET=1, set before the first import, the
operators run on host tensors in Triton's interpreter, slowly: for tests and for simulated devices.
"""
