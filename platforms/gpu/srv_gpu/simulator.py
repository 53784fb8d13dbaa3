"""Which GPU the environment asks to simulate. Torch-free: probes and manifests read it.

    SRV_GPU_SIMULATOR unset          the GPUs of this machine
    SRV_GPU_SIMULATOR=sm90|gfx942... the simulator of that GPU, from the distribution srv-gpu-simulator; it concerns
                                     only the platform that has this variant
    SRV_GPU_SIMULATOR_COUNT=2        how many such GPUs this host has; 1 if unset

A simulator is never chosen by itself: its device facts say that it is simulated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from srv.errors import PlatformUnavailable
from srv.platform.facts import DeviceFacts
from srv.platform.host import is_installed, versions
from srv_gpu.tools import triton_version

VARIABLE = "SRV_GPU_SIMULATOR"
COUNT_VARIABLE = "SRV_GPU_SIMULATOR_COUNT"
PACKAGE = "srv_gpu_simulator"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
    "rocm": ("gfx942", "gfx950", "gfx1100"),
    "xpu": ("pvc", "bmg"),
}
_UNSET_REMEDY = f"Unset {VARIABLE}"


def simulated_variant(platform: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The variant to simulate on this platform, or None for real devices. An empty value counts as unset.

    Raises PlatformUnavailable for a name that no platform has, and if the simulator is not installed.
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    setting = f"{VARIABLE}={name} (set by the environment) asks for a simulated GPU"
    variants = [variant for of_vendor in VARIANTS.values() for variant in of_vendor]
    if name not in variants:
        remedy = f"{_UNSET_REMEDY}, or set it to one of {', '.join(variants)}"
        raise PlatformUnavailable(platform, f"{setting}, but there is no such one", remedy, "unknown_simulated_device")
    if name not in VARIANTS[platform]:
        return None
    if not is_installed(PACKAGE):
        remedy = f"{_UNSET_REMEDY}, or install it: pip install -e plugins/gpu_simulator in a checkout of srv"
        reason = f"{setting}, but the distribution srv-gpu-simulator is not installed"
        raise PlatformUnavailable(platform, reason, remedy, "simulator_missing")
    return name


def simulated_count(platform: str, environ: Mapping[str, str] = os.environ) -> int:
    """How many GPUs are simulated. Raises PlatformUnavailable for what is no number above 0."""
    text = environ.get(COUNT_VARIABLE) or "1"
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    reason = f"{COUNT_VARIABLE}={text} (set by the environment) is not a number of GPUs"
    raise PlatformUnavailable(platform, reason, "Set it to 1 or more, or unset it", "bad_simulated_count")


def simulated_facts(
    variant: str, profiles: Mapping[str, DeviceFacts], stand_ins: Mapping[str, str], count: int = 1
) -> DeviceFacts:
    """The facts of `count` devices. `stand_ins`: versions of the vendor's libraries that the simulator imitates."""
    profile = profiles[variant]
    tool_versions = versions("torch", "srv-gpu-simulator") | triton_version() | dict(stand_ins)
    name = f"{profile.name} (simulated)"
    return DeviceFacts(variant, profile.memory_bytes, count, name, tool_versions, simulated=True)


def simulated_note(device: DeviceFacts) -> str:
    return f"{device.name} runs in software because {VARIABLE} is set: slow, and for development only"


def worker_environment(device: DeviceFacts, rank: int) -> dict[str, str]:
    """`Manifest.worker_env`: on a simulated device, Triton's kernels run in its interpreter."""
    return {"TRITON_INTERPRET": "1"} if device.simulated else {}
