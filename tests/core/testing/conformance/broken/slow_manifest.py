"""Importing the manifest takes seconds, like one that looks for its device.

Caught by manifest.import_time at L0, naming "s to import".
"""

from __future__ import annotations

import time

from toy_variant import manifest

time.sleep(2.5)  # the fault

MANIFEST = manifest("slow_manifest")
