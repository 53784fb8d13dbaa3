"""The platform and its probe report twice the memory that the device has.

Caught by pool.accounting at L1, naming "fewer are free".
"""

from __future__ import annotations

from dataclasses import replace

from toy_memory import doubled
from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult
from srv_toy_device import manifest as toy


def probe(context: ProbeContext) -> ProbeResult:
    result = toy.probe(context)
    assert result.device is not None
    return replace(result, device=replace(result.device, memory_bytes=2 * result.device.memory_bytes))  # the fault


MANIFEST = manifest("memory_and_probe_doubled", platform=doubled, probe=probe)
