"""What the sensors of GPUs have in common: loading the vendor's library, and which devices are visible. Torch-free."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from srv.platform.facts import DeviceFacts
from srv.platform.sensors import Readings
from srv_gpu.simulator import PACKAGE


def load_library(name: str, device: DeviceFacts) -> ModuleType | str:
    """A vendor's library for reading sensors, or a clause that says why there is none.

    For a simulated device it is the simulator's stand-in of that name.
    """
    try:
        return importlib.import_module(f"{PACKAGE}.{name}" if device.simulated else name)
    except ImportError:
        return "is not installed"
    except (OSError, AttributeError, KeyError) as error:  # it finds no library of the driver
        return f"cannot be loaded: {type(error).__name__}: {error}"


def missing_library(name: str, why: str, remedy: str) -> Readings:
    return Readings(missing=f"the Python package {name} {why}", remedy=remedy)


def is_visible(index: int, uuid: str, variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a device is among those that an environment variable selects, by index or by the start of its UUID.

    Indices are the driver's, in the order of the PCI bus. CUDA has this order for equal cards; unequal ones it numbers
    from the fastest, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. An unset variable selects all.
    """
    text = environ.get(variable)
    if text is None:
        return True
    selected = [entry.strip() for entry in text.split(",")]
    return any(
        entry == str(index) or (not entry.isdecimal() and entry and uuid.startswith(entry)) for entry in selected
    )
