"""Is there an Ascend NPU with its driver, CANN, and torch_npu? Or does the environment ask for a simulated one?

Without driver or CANN, importing torch_npu fails with ImportError, OSError or RuntimeError, depending on what is
missing. So it is imported last, in the probe's child process, which was started without torch's backend autoload.
"""

from __future__ import annotations

from pathlib import Path

from srv.errors import PlatformUnavailable
from srv.platform.facts import DeviceFacts
from srv.platform.host import is_installed, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv.platform.pci import ACCELERATOR, ROOT, cards
from srv_npu.sdk import SIMULATOR_VARIABLE, WHEEL_REMEDY, Sdk, load_sdk, simulated_device
from srv_npu.soc import generation_of, variant_of

_DEV = Path("/dev")
_MANAGER = "davinci_manager"
_HUAWEI = 0x19E5
_DRIVER_REMEDY = (
    "Install the Ascend driver and firmware (HDK) and check with npu-smi; in a container, pass /dev/davinci*"
)
_SIMULATED = "simulated"


def probe(context: ProbeContext) -> ProbeResult:
    """Ascend NPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_device() is not None
    if not simulated:
        missing = missing_part(_DEV, is_installed("torch_npu"), present_cards())
        if missing is not None:
            return missing
    try:
        return look(load_sdk(), simulated=simulated)
    except PlatformUnavailable as error:
        return ProbeResult(False, error.reason, error.remedy, error.code)
    except (OSError, RuntimeError) as error:  # the runtime cannot open a device
        return _not_opened(error)


def present_cards(root: Path = ROOT) -> tuple[str, ...]:
    """The NPUs that the PCI bus lists, with or without a driver.

    Display controllers are left out: the management controllers of Huawei's servers are some.
    """
    return tuple(f"Ascend NPU {card}" for card in cards(_HUAWEI, root, (ACCELERATOR,)))


def missing_part(dev: Path, has_wheel: bool, present: tuple[str, ...] = ()) -> ProbeResult | None:
    """The result if torch_npu or its driver is missing, found without importing torch_npu."""
    has_driver = (dev / _MANAGER).exists()
    there = f"there is an {present[0]}, but " if present else ""
    if not has_wheel:
        driver = "" if has_driver else f", and no Ascend driver is here either ({dev / _MANAGER} is missing)"
        reason = f"{there}torch_npu is not installed{driver}"
        remedy = WHEEL_REMEDY if has_driver or not present else f"{WHEEL_REMEDY}. {_DRIVER_REMEDY}"
        return ProbeResult(False, reason, remedy, "torch_npu_missing", present=present)
    if not has_driver:
        reason = f"{there}torch_npu has no driver: {dev / _MANAGER} is missing"
        return ProbeResult(False, reason, _DRIVER_REMEDY, "driver_missing", present=present)
    return None


def look(sdk: Sdk, *, simulated: bool) -> ProbeResult:
    """The devices that the SDK sees. The SoC number can be read only once a device is open."""
    npu = sdk.npu
    count = npu.device_count() if npu.is_available() else 0
    if count == 0:
        remedy = "Check ASCEND_RT_VISIBLE_DEVICES, and whether npu-smi lists the device"
        return ProbeResult(False, "torch_npu sees no device", remedy, "no_device")
    npu.set_device(0)
    first = npu.get_device_properties(0)
    return judge(npu.get_soc_version(), first.name, first.total_memory, count, simulated=simulated)


def judge(soc: int, name: str, memory: int, count: int, *, simulated: bool = False) -> ProbeResult:
    """The result for `count` devices with one SoC number, which the SDK calls `name`."""
    variant = variant_of(soc)
    if variant is None:
        remedy = "Use a device of a supported generation: A2 (Ascend 910B) or A3 (Ascend 910_93)"
        reason = f"{name} is {generation_of(soc)}, which is not supported yet"
        return ProbeResult(False, reason, remedy, "unsupported_variant")
    if simulated and _SIMULATED not in name.lower():
        name = f"{name} ({_SIMULATED})"
    tool_versions = versions("torch", "srv-npu-simulator" if simulated else "torch-npu", "triton-ascend")
    device = DeviceFacts(variant, memory, count, name, tool_versions, simulated=simulated)
    note = f"{name} is simulated in software because {SIMULATOR_VARIABLE} is set: slow, and for development only"
    return ProbeResult(True, device=device, notes=(note,) if simulated else ())


def _not_opened(error: Exception) -> ProbeResult:
    lines = str(error).strip().splitlines()
    reason = f"torch_npu is loaded but cannot open a device: {lines[0] if lines else type(error).__name__}"
    return ProbeResult(False, reason, _DRIVER_REMEDY, "device_failed")
