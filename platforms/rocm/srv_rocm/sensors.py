"""The sensors of AMD GPUs, through the Python package amdsmi, which belongs to a ROCm release. Torch-free.

No AMD GPU has run this yet: the calls are those of amdsmi 7.0.2, held against a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from srv.platform.facts import DeviceFacts
from srv.platform.sensors import Reading, Readings
from srv_gpu.sensors import is_visible, load_library, missing_library

_PACKAGE = "amdsmi"
_REMEDY = (
    f"Install the {_PACKAGE} of your ROCm release: pip install /opt/rocm/share/amd_smi, or pip install {_PACKAGE}."
)
_MIB = 1 << 20
_UNKNOWN = "N/A"  # what amdsmi returns for a value that a GPU does not report
_THROTTLE = {"power_cap": "active_ppt_pwr", "thermal_socket": "active_socket_thrm", "thermal_memory": "active_hbm_thrm"}


def sensors(device: DeviceFacts) -> Readings:
    """See `Manifest.sensors`. Devices are those that HIP_VISIBLE_DEVICES selects."""
    smi: Any = load_library(_PACKAGE, device)
    if isinstance(smi, str):
        return missing_library(_PACKAGE, smi, _REMEDY)
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        return Readings(missing=f"amdsmi does not start: {error}", remedy="Check the driver with amd-smi.")
    try:
        return Readings(tuple(_readings(smi)))
    except smi.AmdSmiException as error:
        return Readings(missing=f"amdsmi lists no devices: {error}", remedy="Check the driver with amd-smi.")
    finally:
        smi.amdsmi_shut_down()


def _readings(smi: Any) -> Iterator[Reading]:
    for index, handle in enumerate(smi.amdsmi_get_processor_handles()):
        if is_visible(index, smi.amdsmi_get_gpu_device_uuid(handle), "HIP_VISIBLE_DEVICES"):
            yield _reading(smi, index, handle)


def _reading(smi: Any, index: int, handle: Any) -> Reading:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except smi.AmdSmiException:  # this device does not support it
            return None

    hottest = (smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT)
    busy = _number(ask(smi.amdsmi_get_gpu_activity), "gfx_activity")
    used, total = (_number(ask(smi.amdsmi_get_gpu_vram_usage), name) for name in ("vram_used", "vram_total"))
    watts = ask(smi.amdsmi_get_power_info)
    fields = ("socket_power", "current_socket_power", "average_socket_power")  # by generation and release
    power = next((value for name in fields if (value := _number(watts, name)) is not None), None)
    throttle = ask(smi.amdsmi_get_violation_status) or {}
    return Reading(
        device=str(index),
        name=(ask(smi.amdsmi_get_gpu_asic_info) or {}).get("market_name", "AMD GPU"),
        utilization=None if busy is None else busy / 100,
        temperature=ask(smi.amdsmi_get_temp_metric, *hottest),
        power=power,
        memory_used=None if used is None else int(used * _MIB),
        memory_total=None if total is None else int(total * _MIB),
        throttle={name: throttle[key] for name, key in _THROTTLE.items() if throttle.get(key, _UNKNOWN) != _UNKNOWN},
    )


def _number(values: Any, name: str) -> float | None:
    value = None if values is None else values.get(name, _UNKNOWN)
    return None if value is None or value == _UNKNOWN else float(value)
