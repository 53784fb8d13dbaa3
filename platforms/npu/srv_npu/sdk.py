"""Loads the vendor's operators: from torch_npu, or from the simulator that the environment names.

    SRV_NPU_SIMULATOR unset             the installed torch_npu
    SRV_NPU_SIMULATOR=a2|a2-32g|a3      the simulator of that device, from the distribution srv-npu-simulator

The rest of the package calls operators on the object that `load_sdk` returns; no other module imports torch_npu.
Loading takes seconds and claims torch's device name "npu" for the rest of the process, so only workers and the probe's
child process do it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from srv.errors import PlatformUnavailable
from srv.platform.host import is_installed

if TYPE_CHECKING:
    import torch

NAME = "npu"
SIMULATOR_VARIABLE = "SRV_NPU_SIMULATOR"
SIMULATED = ("a2", "a2-32g", "a3")
_SDK = "torch_npu"
_SIMULATOR = "srv_npu_simulator"

WHEEL_REMEDY = "Install the torch_npu release with the same version number as torch, together with CANN"
_CANN_REMEDY = "Install the CANN release that torch_npu needs, source its set_env.sh, and start again"
_UNSET_REMEDY = f"Unset {SIMULATOR_VARIABLE}"


class Sdk(Protocol):
    """The module torch_npu or the simulator: its operators, and the device functions under `npu`."""

    @property
    def npu(self) -> Any: ...

    def __getattr__(self, operator: str) -> Any: ...


def simulated_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """The device to simulate, from the environment; None for real ones. An empty value counts as unset."""
    return environ.get(SIMULATOR_VARIABLE) or None


def load_sdk(environ: Mapping[str, str] = os.environ) -> Sdk:
    """Import the SDK. Raises PlatformUnavailable, with reason and remedy, if that fails."""
    soc = simulated_device(environ)
    return _real() if soc is None else _simulator(soc)


def _real() -> Sdk:
    if not is_installed(_SDK):
        raise PlatformUnavailable(NAME, "torch_npu is not installed", WHEEL_REMEDY, "torch_npu_missing")
    try:
        return cast(Sdk, importlib.import_module(_SDK))
    except (ImportError, OSError, RuntimeError) as error:  # depends on which of its libraries is missing
        lines = str(error).strip().splitlines()
        reason = f"torch_npu is installed but cannot be loaded: {lines[0] if lines else type(error).__name__}"
        raise PlatformUnavailable(NAME, reason, _CANN_REMEDY, "toolkit_missing") from error


def _simulator(soc: str) -> Sdk:
    setting = f"{SIMULATOR_VARIABLE}={soc} (set by the environment) asks for a simulated device"
    if soc not in SIMULATED:
        reason = f"{setting}, but there is no such device"
        remedy = f"{_UNSET_REMEDY}, or set it to one of {', '.join(SIMULATED)}"
        raise PlatformUnavailable(NAME, reason, remedy, "unknown_simulated_device")
    if is_installed(_SDK):
        reason = f"{setting}, but torch_npu is installed here: both would be the device npu of torch"
        remedy = f"{_UNSET_REMEDY} to use real devices, or simulate in an environment without torch_npu"
        raise PlatformUnavailable(NAME, reason, remedy, "simulator_beside_sdk")
    if not is_installed(_SIMULATOR):
        reason = f"{setting}, but the distribution srv-npu-simulator is not installed"
        remedy = f"{_UNSET_REMEDY}, or install it: pip install -e plugins/npu_simulator in a checkout of srv"
        raise PlatformUnavailable(NAME, reason, remedy, "simulator_missing")
    return cast(Sdk, importlib.import_module(_SIMULATOR).load(soc))


def pinned(sdk: Sdk, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New page-locked host memory. torch_npu extends `torch.empty` with it; a simulator cannot, and has a function."""
    import torch

    make = getattr(sdk.npu, "pinned", None)
    memory: torch.Tensor = torch.empty(shape, dtype=dtype, pin_memory=True) if make is None else make(shape, dtype)
    return memory
