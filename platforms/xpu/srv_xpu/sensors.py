"""Says that the sensors of Intel GPUs are not read: Intel publishes no Python package for them. Torch-free."""

from __future__ import annotations

from srv.platform.facts import DeviceFacts
from srv.platform.sensors import Readings


def sensors(device: DeviceFacts) -> Readings:
    """See `Manifest.sensors`."""
    return Readings(missing="there is no Python package for the sensors of Intel GPUs; `xpu-smi stats -d 0` shows them")
