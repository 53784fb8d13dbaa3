"""The platform reports twice the memory that the device has, and that its probe reports.

Caught by platform.memory at L1, naming "but the probe reported".
"""

from __future__ import annotations

from toy_memory import doubled
from toy_variant import manifest

MANIFEST = manifest("memory_doubled", platform=doubled)  # the fault
