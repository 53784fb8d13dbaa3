"""The entry point: what this platform is, whether it works here, and how to start it. Imports no torch.

[project.entry-points."srv.platforms"]
toy = "srv_toy_device.manifest:MANIFEST"
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from srv.platform.facts import DeviceFacts
from srv.platform.manifest import EngineContext, Manifest, ProbeContext, ProbeResult
from srv_toy_device.facts import DEVICE_NAME, FACTS, VARIANT
from srv_toy_device.settings import asynchronous, device_count, device_memory

if TYPE_CHECKING:
    from srv.platform.interface import Platform

# The PyTorch function with which Python code can claim the PrivateUse1 backend, and the file that defines it.
_SETUP = "_setup_privateuseone_for_python_backend"
_SETUP_FILE = Path("utils", "backend_registration.py")


def probe(context: ProbeContext) -> ProbeResult:
    """Look for a PyTorch that supports backends written in Python, by its files, without importing it."""
    try:
        memory = device_memory(os.environ)
        count = device_count(os.environ)
        asynchronous(os.environ)
    except ValueError as error:
        return ProbeResult(False, str(error), "Correct or unset it.", "bad_setting")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return ProbeResult(False, "PyTorch is not installed", "Install torch.", "torch_missing")
    version = importlib.metadata.version("torch")
    source = Path(torch.origin).parent / _SETUP_FILE
    if not source.is_file() or _SETUP not in source.read_text(encoding="utf-8"):
        return ProbeResult(
            False,
            f"torch {version} does not support backends written in Python: {_SETUP_FILE} lacks {_SETUP}",
            "Install a newer torch; 2.13 is known to work.",
            "torch_too_old",
        )
    device = DeviceFacts(
        variant=VARIANT, memory_bytes=memory, count=count, name=DEVICE_NAME, versions={"torch": version}
    )
    return ProbeResult(True, device=device)


def create(context: EngineContext) -> Platform:
    """Register the device with PyTorch in this process, and return the platform. This is the first import of torch."""
    from srv_toy_device.device import install
    from srv_toy_device.platform import ToyPlatform

    return ToyPlatform(install(), context.device_index)


MANIFEST = Manifest(
    name="toy",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=(VARIANT,),
    priority=0,
    summary="a simulated accelerator with its own memory, as an example and for tests; not for speed",
    facts=FACTS,
    probe=probe,
    create=create,
    simulated=True,
)
