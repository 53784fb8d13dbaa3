"""A stand-in for the functions of pynvml (nvidia-ml-py) that `srv_cuda.sensors` calls. Imports no torch.

It reports one idle GPU, that of SRV_GPU_SIMULATOR, whose name says that it is simulated; every figure is constant. Like
NVML it refuses calls before `nvmlInit` and handles that it has not given out.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from srv_gpu_simulator import VARIABLE
from srv_gpu_simulator.cards import Card, find_card

NVML_TEMPERATURE_GPU = 0
nvmlClocksThrottleReasonGpuIdle = 0x1
nvmlClocksThrottleReasonSwPowerCap = 0x4
nvmlClocksThrottleReasonHwSlowdown = 0x8
nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

_UNINITIALIZED, _INVALID_ARGUMENT, _NOT_SUPPORTED = 1, 2, 3
_TEXTS = {_UNINITIALIZED: "Uninitialized", _INVALID_ARGUMENT: "Invalid Argument", _NOT_SUPPORTED: "Not Supported"}
_sessions: list[None] = []  # one per call of nvmlInit that nvmlShutdown has not undone


class NVMLError(Exception):
    """An error of NVML, by its number."""

    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS[value])
        self.value = value


class _Handle:
    """Of the one device."""


_HANDLE = _Handle()


def nvmlInit() -> None:
    _sessions.append(None)


def nvmlShutdown() -> None:
    _require(bool(_sessions), _UNINITIALIZED)
    _sessions.pop()


def nvmlDeviceGetCount() -> int:
    _card()
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    _card()
    _require(index == 0, _INVALID_ARGUMENT)
    return _HANDLE


def nvmlDeviceGetUUID(handle: _Handle) -> str:
    return f"GPU-simulated-{_card(handle).key}"


def nvmlDeviceGetName(handle: _Handle) -> str:
    return _card(handle).device_name


def nvmlDeviceGetUtilizationRates(handle: _Handle) -> SimpleNamespace:
    _card(handle)
    return SimpleNamespace(gpu=0, memory=0)


def nvmlDeviceGetTemperature(handle: _Handle, sensor: int) -> int:
    _card(handle)
    _require(sensor == NVML_TEMPERATURE_GPU, _INVALID_ARGUMENT)
    return 25


def nvmlDeviceGetPowerUsage(handle: _Handle) -> int:
    """Milliwatts. GeForce cards report none, so that callers meet a refusal too."""
    _require("GeForce" not in _card(handle).name, _NOT_SUPPORTED)
    return 50_000


def nvmlDeviceGetMemoryInfo(handle: _Handle, version: int | None = None) -> SimpleNamespace:
    total = _card(handle).memory
    return SimpleNamespace(total=total, free=total, used=0)


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: _Handle) -> int:
    _card(handle)
    return nvmlClocksThrottleReasonGpuIdle


def _card(handle: _Handle = _HANDLE) -> Card:
    _require(bool(_sessions), _UNINITIALIZED)
    _require(handle is _HANDLE, _INVALID_ARGUMENT)
    return find_card(os.environ[VARIABLE])


def _require(condition: bool, error: int) -> None:
    if not condition:
        raise NVMLError(error)
