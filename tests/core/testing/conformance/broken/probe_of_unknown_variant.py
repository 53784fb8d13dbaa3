"""The probe finds a device of a variant that the manifest does not name, without a note about it.

Caught by probe.device at L0, naming "'toy2'".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult
from srv_toy_device import manifest as toy


def probe(context: ProbeContext) -> ProbeResult:
    result = toy.probe(context)
    return replace(result, device=replace(result.device, variant="toy2")) if result.device else result  # the fault


MANIFEST = manifest("probe_of_unknown_variant", probe=probe)
