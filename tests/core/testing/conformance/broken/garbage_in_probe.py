"""The probe, or a library that it loads, writes to every open file, including the pipe for its result.

Caught by probe.answers at L0, naming "cannot be parsed".
"""

from __future__ import annotations

import os
from contextlib import suppress

from toy_variant import manifest

from srv.platform.manifest import ProbeContext, ProbeResult


def probe(context: ProbeContext) -> ProbeResult:
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"driver: initialising\n")  # the fault
    return ProbeResult(False, "no device", "Install one", "no_device")


MANIFEST = manifest("garbage_in_probe", probe=probe)
