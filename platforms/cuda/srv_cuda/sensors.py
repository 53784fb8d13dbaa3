"""The sensors of NVIDIA GPUs, through NVML and its Python package (nvidia-ml-py). Torch-free.

NVML is a part of the driver, and is called without a context on the device. Every call may be unsupported by a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from srv.platform.facts import DeviceFacts
from srv.platform.sensors import Reading, Readings
from srv_gpu.sensors import is_visible, load_library, missing_library

_PACKAGE = "nvidia-ml-py"
_REMEDY = f'Install it: pip install {_PACKAGE}, or "srv[cuda]".'
_DRIVER_REMEDY = "Check the driver with nvidia-smi."
# The bits of NVML that say why clocks are lowered; others are idle clocks and limits that a user has set.
_THROTTLE = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "thermal_software": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "thermal_hardware": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "hardware_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
}


def sensors(device: DeviceFacts) -> Readings:
    """See `Manifest.sensors`. Devices are those that CUDA_VISIBLE_DEVICES selects."""
    nvml: Any = load_library("pynvml", device)
    if isinstance(nvml, str):
        return missing_library(_PACKAGE, nvml, _REMEDY)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Readings(missing=f"NVML does not start: {error}", remedy=_DRIVER_REMEDY)
    try:
        return Readings(tuple(_readings(nvml)))
    except nvml.NVMLError as error:
        return Readings(missing=f"NVML lists no devices: {error}", remedy=_DRIVER_REMEDY)
    finally:
        nvml.nvmlShutdown()


def _readings(nvml: Any) -> Iterator[Reading]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if is_visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), "CUDA_VISIBLE_DEVICES"):
            yield _reading(nvml, index, handle)


def _reading(nvml: Any, index: int, handle: Any) -> Reading:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:  # this device does not support it
            return None

    rates, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
    bits = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return Reading(
        device=str(index),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        utilization=None if rates is None else rates.gpu / 100,
        temperature=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        power=None if milliwatts is None else milliwatts / 1000,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        throttle={} if bits is None else {name: bool(bits & getattr(nvml, bit)) for name, bit in _THROTTLE.items()},
    )


def _text(value: str | bytes) -> str:
    """Releases of nvidia-ml-py before 11.510 return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
