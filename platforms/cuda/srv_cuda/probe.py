"""Checks whether there is an NVIDIA GPU with a driver, and a torch that was built for it. Imports no torch.

It calls the driver's library (the CUDA driver API, through ctypes), which takes milliseconds and honours
CUDA_VISIBLE_DEVICES. It runs in the probe's child process, so that a crash of the driver does not affect the server.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import torch_build, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_cuda.facts import PROFILES, STAND_INS, VARIANTS
from srv_gpu.cards import Build, Cards, Fault, Vendor
from srv_gpu.probe import simulated_probe
from srv_gpu.tools import flashinfer_tools, triton_version

NVIDIA = Vendor("NVIDIA", 0x10DE, "cuda", integrated=lambda product: False)
_CONTROL_DEVICE = Path("/dev/nvidiactl")
_LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_DRIVER_REMEDY = "Install NVIDIA's driver and check it with nvidia-smi; in a container, start it with GPU access"


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver and its devices. `version`: the newest CUDA release that it supports, as (major, minor)."""

    version: tuple[int, int]
    devices: tuple[tuple[str, int, int, int], ...]  # name, bytes, compute capability major, minor


class DriverError(Exception):
    """The driver's library is missing or returns an error."""


def probe(context: ProbeContext) -> ProbeResult:
    """NVIDIA GPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_probe("cuda", PROFILES, STAND_INS)
    if simulated is not None:
        return simulated
    return examine(NVIDIA.find(), torch_build(), missing_driver(), query_driver)


def missing_driver() -> Fault | None:
    """Neither the driver's control device nor its library: a container may have only one of them."""
    if _CONTROL_DEVICE.exists() or _library_loads():
        return None
    reason = f"no NVIDIA driver: neither {_CONTROL_DEVICE} nor {_LIBRARY} exists"
    return Fault(reason, _DRIVER_REMEDY, "driver_missing")


def examine(cards: Cards, build: Build, driver: Fault | None, query: Callable[[], Driver]) -> ProbeResult:
    """The result for the cards on the bus, the build of torch, a driver that is there or not, and its devices.

    Without cards on the bus, the driver's devices count: virtual machines may hide the bus.
    """
    if driver is not None and (refusal := cards.refusal(build, driver)) is not None:
        return refusal
    try:
        result = judge(query(), build)
    except DriverError as error:
        result = ProbeResult(False, f"the NVIDIA driver does not work: {error}", _DRIVER_REMEDY, "driver_failed")
    return replace(result, present=cards.present)


def judge(driver: Driver, build: Build) -> ProbeResult:
    """The result for a working driver and what torch was built for."""
    if not driver.devices:
        remedy = "Check CUDA_VISIBLE_DEVICES, and the devices that nvidia-smi lists"
        return ProbeResult(False, "the NVIDIA driver reports no device", remedy, "no_device")
    device, notes = _describe(driver)
    release = NVIDIA.built_for(build)
    if release is None:
        fault = NVIDIA.wrong_torch(build)
        return ProbeResult(
            False, f"there is an {device.name}, but {fault.reason}", fault.remedy, fault.code, device, notes
        )
    if driver.version[0] < int(release.partition(".")[0]):
        supported = f"{driver.version[0]}.{driver.version[1]}"
        return ProbeResult(
            False,
            f"torch was built for CUDA {release}, but the driver supports CUDA {supported} at most",
            "Update the NVIDIA driver, or install a torch built for an older CUDA",
            "driver_too_old",
            device,
            notes,
        )
    return ProbeResult(True, device=device, notes=notes)


def _describe(driver: Driver) -> tuple[DeviceFacts, tuple[str, ...]]:
    name, memory, major, minor = driver.devices[0]
    variant = f"sm{major}{minor}"
    notes: list[str] = []
    if variant not in VARIANTS:
        notes.append(f"{variant} is not a supported variant ({', '.join(VARIANTS)})")
    if len({device[0] for device in driver.devices}) > 1:
        notes.append(f"the devices differ: {', '.join(device[0] for device in driver.devices)}")
    tool_versions = {"driver (CUDA)": f"{driver.version[0]}.{driver.version[1]}"}
    tool_versions |= versions("torch") | triton_version() | flashinfer_tools()
    memory = min(device[1] for device in driver.devices)
    return DeviceFacts(variant, memory, len(driver.devices), name, tool_versions), tuple(notes)


def query_driver() -> Driver:
    """Query the CUDA driver API; DriverError with the driver's message if a call fails."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(str(error)) from error
    _call(cuda, "cuInit", 0)
    number = ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    _call(cuda, "cuDeviceGetCount", ctypes.byref(number))
    return Driver(version, tuple(_device(cuda, index) for index in range(number.value)))


def _device(cuda: ctypes.CDLL, index: int) -> tuple[str, int, int, int]:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGet", ctypes.byref(handle), index)
    _call(cuda, "cuDeviceGetName", name, len(name), handle)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, handle)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, handle)
    return name.value.decode(errors="replace"), memory.value, major.value, minor.value


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(cuda, function)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        has_name = cuda.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value is not None
        detail = (text.value or b"").decode(errors="replace") if has_name else "an unknown error"
        raise DriverError(f"{function} returned {status}, {detail}")


def _library_loads() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True
