"""The device on which tests run Triton's kernels: the same tests run interpreted, on a GPU or on a simulated one.

SRV_KERNEL_DEVICE=cuda|rocm|xpu   that platform's device; with SRV_GPU_SIMULATOR its simulated one
unset, TRITON_INTERPRET=1         the host, where kernels are interpreted
unset, TRITON_INTERPRET=0         the accelerator that torch was built for
"""

from __future__ import annotations

import os
from functools import cache

import torch

VARIABLE = "SRV_KERNEL_DEVICE"
# By the names that Triton, and so `srv_kernels.triton.targets`, has for them.
FLOAT8 = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}


@cache
def kernel_device() -> torch.device | None:
    """None if there is no accelerator. Raises PlatformUnavailable if the environment names one that cannot be used.

    A named device fails instead of skipping, so that a run on a GPU never passes without one.
    """
    platform = os.environ.get(VARIABLE)
    if platform:
        return _of_platform(platform)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()


@cache
def kernel_target() -> str | None:
    """The target of the kernels ("sm80", "gfx942"), also if it is simulated; None on the host and on Intel's GPUs."""
    from srv_gpu.simulator import simulated_variant

    platform, device = os.environ.get(VARIABLE), kernel_device()
    simulated = simulated_variant(platform) if platform else None
    if simulated is not None or device is None or device.type != "cuda":
        return simulated
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def has_dtype(dtype: torch.dtype) -> bool:
    """Whether kernels may be tested with a dtype here: the host has every float8, a target those that it declares."""
    from srv_kernels.triton.targets import BY_NAME

    name = kernel_target()
    if dtype not in FLOAT8 or name is None:
        return True
    target = BY_NAME.get(name) or BY_NAME["sm90"]  # newer generations have these types
    return FLOAT8[dtype] in target.float8


def _of_platform(platform: str) -> torch.device:
    from srv_gpu import triton_ops
    from srv_gpu.accelerator import load_accelerator

    accelerator = load_accelerator(platform)
    device = accelerator.device(0)
    accelerator.module.set_device(device)
    torch.empty(1, device=device)  # fails here if the driver or the device does not work
    triton_ops.load(accelerator)
    return device
