"""Is there an Ascend NPU with its driver, CANN, and torch_npu? Or is one to be simulated?

torch_npu without driver or CANN fails when it is imported (ImportError, OSError or RuntimeError, by what is
missing), so it is imported last, in the probe's child process, which was started without torch's autoload.
"""

from __future__ import annotations

from pathlib import Path

from srv.errors import PlatformUnavailable
from srv.platform.facts import DeviceFacts
from srv.platform.host import is_installed, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_npu.sdk import SIMULATOR_VARIABLE, WHEEL_REMEDY, Sdk, load_sdk, simulated_device
from srv_npu.soc import generation_of, variant_of

_DEV = Path("/dev")
_MANAGER = "davinci_manager"
_DRIVER_REMEDY = (
    "Install the Ascend driver and firmware (HDK) and check with npu-smi; in a container, pass /dev/davinci*"
)
_SIMULATED = "simulated"


def probe(context: ProbeContext) -> ProbeResult:
    """Ascend NPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_device() is not None
    if not simulated:
        before = obstacle(_DEV, is_installed("torch_npu"))
        if before is not None:
            return before
    try:
        return look(load_sdk(), simulated=simulated)
    except PlatformUnavailable as error:
        return ProbeResult(False, error.reason, error.remedy, error.code)
    except (OSError, RuntimeError) as error:  # the runtime's own refusal to open a device
        return _not_opened(error)


def obstacle(dev: Path, has_wheel: bool) -> ProbeResult | None:
    """What stands in the way before torch_npu need be imported."""
    has_driver = (dev / _MANAGER).exists()
    if not has_wheel:
        driver = "" if has_driver else f", and no Ascend driver is here either ({dev / _MANAGER} is missing)"
        return ProbeResult(False, f"torch_npu is not installed{driver}", WHEEL_REMEDY, "torch_npu_missing")
    if not has_driver:
        reason = f"torch_npu is installed, but its driver is not: {dev / _MANAGER} is missing"
        return ProbeResult(False, reason, _DRIVER_REMEDY, "driver_missing")
    return None


def look(sdk: Sdk, *, simulated: bool) -> ProbeResult:
    """What the SDK sees. The SoC's number can be asked for only once a device is open."""
    npu = sdk.npu
    count = npu.device_count() if npu.is_available() else 0
    if count == 0:
        remedy = "Look at ASCEND_RT_VISIBLE_DEVICES, and at npu-smi for what the driver sees"
        return ProbeResult(False, "torch_npu sees no device", remedy, "no_device")
    npu.set_device(0)
    first = npu.get_device_properties(0)
    return judge(npu.get_soc_version(), first.name, first.total_memory, count, simulated=simulated)


def judge(soc: int, name: str, memory: int, count: int, *, simulated: bool = False) -> ProbeResult:
    """The result for `count` devices of one SoC number, which the SDK calls `name`."""
    variant = variant_of(soc)
    if variant is None:
        remedy = "This platform knows A2 (Ascend 910B) and A3 (Ascend 910_93)"
        reason = f"{name} is of {generation_of(soc)}, which is not supported yet"
        return ProbeResult(False, reason, remedy, "unsupported_variant")
    if simulated and _SIMULATED not in name.lower():
        name = f"{name} ({_SIMULATED})"
    found = versions("torch", "srv-npu-simulator" if simulated else "torch-npu", "triton-ascend")
    device = DeviceFacts(variant, memory, count, name, found, simulated=simulated)
    note = f"{name} is played by software, slowly, because {SIMULATOR_VARIABLE} is set: it is for development alone"
    return ProbeResult(True, device=device, notes=(note,) if simulated else ())


def _not_opened(error: Exception) -> ProbeResult:
    lines = str(error).strip().splitlines()
    reason = f"torch_npu is loaded but cannot open a device: {lines[0] if lines else type(error).__name__}"
    return ProbeResult(False, reason, _DRIVER_REMEDY, "device_failed")
