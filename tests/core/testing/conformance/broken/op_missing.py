"""The platform has no implementation of an op that every model needs.

Caught by op.coverage at L2, naming "rotary".
"""

from __future__ import annotations

from toy_ops import without_op
from toy_variant import manifest

MANIFEST = manifest("op_missing", platform=without_op("rotary"))
