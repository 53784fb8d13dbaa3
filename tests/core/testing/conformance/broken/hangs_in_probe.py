"""The probe never returns, like a driver call that waits for a missing device.

Caught by probe.timeout at L0, naming "did not answer within".
"""

from __future__ import annotations

import time

from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult


def probe(context: ProbeContext) -> ProbeResult:
    time.sleep(600)  # the fault
    return ProbeResult(False, "no device", "Install one", "no_device")


MANIFEST = manifest("hangs_in_probe", probe=probe)
