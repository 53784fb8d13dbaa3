"""A stand-in for the functions of amdsmi 7.0 that `srv_rocm.sensors` calls. Imports no torch.

It reports one idle GPU, that of SRV_GPU_SIMULATOR, whose name says that it is simulated; every figure is constant. Like
amdsmi it refuses calls before `amdsmi_init`, reports "N/A" for what a Radeon card does not measure, and has the status
of violations on Instinct GPUs only.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any

from srv_gpu_simulator import VARIABLE
from srv_gpu_simulator.cards import Card, find_card

_MIB = 1 << 20
_sessions: list[None] = []


class AmdSmiException(Exception):
    """Any error of amdsmi."""


class AmdSmiTemperatureType(IntEnum):
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class _Handle:
    """Of the one device."""


_HANDLE = _Handle()


def amdsmi_init(flag: Any = None) -> None:
    _sessions.append(None)


def amdsmi_shut_down() -> None:
    _require(bool(_sessions), "AMDSMI_STATUS_NOT_INIT")
    _sessions.pop()


def amdsmi_get_processor_handles() -> list[_Handle]:
    _card(_HANDLE)
    return [_HANDLE]


def amdsmi_get_gpu_device_uuid(processor_handle: _Handle) -> str:
    return f"simulated-{_card(processor_handle).key}"


def amdsmi_get_gpu_asic_info(processor_handle: _Handle) -> dict[str, Any]:
    return {"market_name": _card(processor_handle).device_name}


def amdsmi_get_gpu_activity(processor_handle: _Handle) -> dict[str, Any]:
    _card(processor_handle)
    return {"gfx_activity": 0, "umc_activity": 0, "mm_activity": "N/A"}


def amdsmi_get_temp_metric(
    processor_handle: _Handle, sensor_type: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
) -> int:
    _card(processor_handle)
    _require(isinstance(sensor_type, AmdSmiTemperatureType), "AMDSMI_STATUS_INVAL")
    return 25


def amdsmi_get_power_info(processor_handle: _Handle) -> dict[str, Any]:
    """Watts."""
    instinct = _is_instinct(_card(processor_handle))
    reading = {"current_socket_power": 50} if instinct else {"average_socket_power": 50}
    unknown = dict.fromkeys(("socket_power", "current_socket_power", "average_socket_power"), "N/A")
    return unknown | reading


def amdsmi_get_gpu_vram_usage(processor_handle: _Handle) -> dict[str, Any]:
    """MiB."""
    return {"vram_total": _card(processor_handle).memory // _MIB, "vram_used": 0}


def amdsmi_get_violation_status(processor_handle: _Handle) -> dict[str, Any]:
    _require(_is_instinct(_card(processor_handle)), "AMDSMI_STATUS_NOT_SUPPORTED")
    return {"active_ppt_pwr": False, "active_socket_thrm": False, "active_hbm_thrm": "N/A"}


def _is_instinct(card: Card) -> bool:
    return "Instinct" in card.name


def _card(handle: _Handle) -> Card:
    _require(bool(_sessions), "AMDSMI_STATUS_NOT_INIT")
    _require(handle is _HANDLE, "AMDSMI_STATUS_INVAL")
    return find_card(os.environ[VARIABLE])


def _require(condition: bool, error: str) -> None:
    if not condition:
        raise AmdSmiException(error)
