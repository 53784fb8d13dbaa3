"""The probe does not accept the context that core passes.

Caught by manifest.signatures at L0, naming "Manifest.probe".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.manifest import ProbeResult


def probe() -> ProbeResult:  # the fault
    return ProbeResult(False, "no device", "Install one", "no_device")


MANIFEST = manifest("probe_takes_nothing", probe=probe)
