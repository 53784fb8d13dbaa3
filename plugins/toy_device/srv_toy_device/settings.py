"""The settings of the simulated accelerator. The manifest reads them too, so no torch is imported.

SRV_TOY_MEMORY: memory of the device, in bytes or as a number with KiB, MiB or GiB ("512MiB"). 2 GiB if unset.
SRV_TOY_DEVICES: how many devices there are, of which a process uses one; 1 if unset.
SRV_TOY_ASYNCHRONOUS: 1 to run operators only when the host waits, for tests of streams and copies; 0 if unset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from srv_toy_device.facts import MEMORY

MEMORY_VARIABLE = "SRV_TOY_MEMORY"
DEVICES_VARIABLE = "SRV_TOY_DEVICES"
ASYNCHRONOUS_VARIABLE = "SRV_TOY_ASYNCHRONOUS"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB)?\s*")


def device_memory(environ: Mapping[str, str]) -> int:
    """The device's memory in bytes. Raises ValueError, naming the variable, if its value is not a size above zero."""
    text = environ.get(MEMORY_VARIABLE)
    if text is None:
        return MEMORY
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ValueError(
            f"{MEMORY_VARIABLE} = {text!r} (set by the environment) is not a size above zero; "
            "write a number of bytes, or one with KiB, MiB or GiB, such as 512MiB"
        )
    return size


def device_count(environ: Mapping[str, str]) -> int:
    """The number of devices. Raises ValueError, naming the variable, if its value is not a number above zero."""
    text = environ.get(DEVICES_VARIABLE, "1")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{DEVICES_VARIABLE} = {text!r} (set by the environment) is not a number above zero")
    return int(text)


def asynchronous(environ: Mapping[str, str]) -> bool:
    """Whether the device runs operators only when the host waits. ValueError, naming the variable, unless 0 or 1."""
    text = environ.get(ASYNCHRONOUS_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{ASYNCHRONOUS_VARIABLE} = {text!r} (set by the environment) is neither 0 nor 1")
    return text == "1"
