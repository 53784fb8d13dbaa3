"""The probe reports a handle of its process in the device's name, so that no two processes find the same device.

Caught by probe.answers at L0, naming "asked twice".
"""

from __future__ import annotations

import os
from dataclasses import replace

from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult
from srv_toy_device import manifest as toy


def probe(context: ProbeContext) -> ProbeResult:
    result = toy.probe(context)
    assert result.device is not None
    return replace(result, device=replace(result.device, name=f"toy, handle {os.getpid()}"))  # the fault


MANIFEST = manifest("probe_names_its_handle", probe=probe)
