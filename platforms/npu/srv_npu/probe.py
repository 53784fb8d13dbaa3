"""Is there an Ascend NPU with its driver, CANN, and torch_npu?

torch_npu without driver or CANN fails when it is imported (ImportError, OSError or RuntimeError, by what is
missing), so it is imported last, in the probe's child process, which was started without torch's autoload.
"""

from __future__ import annotations

from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import is_installed, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_npu.unbuilt import UNBUILT

_DEV = Path("/dev")
_MANAGER = "davinci_manager"
_WHEEL_REMEDY = "Install the torch_npu release that carries torch's own version number, together with CANN"
_DRIVER_REMEDY = (
    "Install the Ascend driver and firmware (HDK) and check with npu-smi; in a container, pass /dev/davinci*"
)
_CANN_REMEDY = "Install the CANN release that torch_npu names, source its set_env.sh, and start again"

# Device names as torch_npu prints them, longest prefix first; None: known, but not a variant of this platform.
_GENERATIONS = (
    ("ascend910_93", "a3"),
    ("ascend910b", "a2"),
    ("ascend310p", None),
    ("ascend950", None),
)


def probe(context: ProbeContext) -> ProbeResult:
    """Ascend NPUs of this machine."""
    before = obstacle(_DEV, is_installed("torch_npu"))
    if before is not None:
        return before
    try:
        name, memory, count, found = _ask_torch_npu()
    except (ImportError, OSError, RuntimeError) as error:
        return cannot_load(error)
    return judge(name, memory, count, found)


def obstacle(dev: Path, has_wheel: bool) -> ProbeResult | None:
    """What stands in the way before torch_npu need be imported."""
    has_driver = (dev / _MANAGER).exists()
    if not has_wheel:
        driver = "" if has_driver else f", and no Ascend driver is here either ({dev / _MANAGER} is missing)"
        return ProbeResult(False, f"torch_npu is not installed{driver}", _WHEEL_REMEDY, "torch_npu_missing")
    if not has_driver:
        reason = f"torch_npu is installed, but its driver is not: {dev / _MANAGER} is missing"
        return ProbeResult(False, reason, _DRIVER_REMEDY, "driver_missing")
    return None


def cannot_load(error: Exception) -> ProbeResult:
    """The driver is there and importing torch_npu failed: CANN is missing, or does not match."""
    lines = str(error).strip().splitlines()
    reason = f"torch_npu is installed but cannot be loaded: {lines[0] if lines else type(error).__name__}"
    return ProbeResult(False, reason, _CANN_REMEDY, "toolkit_missing")


def judge(name: str, memory: int, count: int, found: dict[str, str]) -> ProbeResult:
    """The result for `count` devices that torch_npu calls `name`."""
    if count == 0:
        remedy = "Look at ASCEND_RT_VISIBLE_DEVICES, and at npu-smi for what the driver sees"
        return ProbeResult(False, "torch_npu sees no device", remedy, "no_device")
    variant = variant_of(name)
    if variant is None:
        remedy = "This platform knows A2 (Ascend 910B) and A3 (Ascend 910_93)"
        return ProbeResult(False, f"{name} is not supported yet", remedy, "unsupported_variant")
    device = DeviceFacts(variant, memory, count, name, found)
    return UNBUILT.found(device)


def variant_of(name: str) -> str | None:
    """The variant of a device name such as "Ascend910B3"; None if it is none that this platform knows."""
    lowered = name.lower()
    return next((variant for prefix, variant in _GENERATIONS if lowered.startswith(prefix)), None)


def _ask_torch_npu() -> tuple[str, int, int, dict[str, str]]:
    import torch
    import torch_npu  # noqa: F401 - registers torch.npu

    npu = torch.npu
    count = npu.device_count() if npu.is_available() else 0
    if count == 0:
        return "", 0, 0, {}
    first = npu.get_device_properties(0)
    return first.name, first.total_memory, count, versions("torch", "torch_npu", "triton-ascend")
