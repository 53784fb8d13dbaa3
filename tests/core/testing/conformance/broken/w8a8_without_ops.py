"""The platform declares 8-bit weights, but has only one of their ops.

Caught by op.coverage at L2, naming "linear_w8a8_static".
"""

from __future__ import annotations

from toy_ops import without_op
from toy_variant import manifest

MANIFEST = manifest("w8a8_without_ops", platform=without_op("linear_w8a8_static"))
