"""The probe crashes its process, like a vendor's library that cannot handle a missing driver.

Caught by probe.answers at L0, naming "SIGSEGV".
"""

from __future__ import annotations

import os
import signal

from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult


def probe(context: ProbeContext) -> ProbeResult:
    os.kill(os.getpid(), signal.SIGSEGV)  # the fault
    return ProbeResult(False, "no device", "Install one", "no_device")


MANIFEST = manifest("crashes_in_probe", probe=probe)
