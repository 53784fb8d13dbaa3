"""It declares bfloat16, but no implementation of any op supports it.

Caught by op.coverage at L2, naming "bfloat16".
"""

from __future__ import annotations

from toy_ops import without_dtype
from toy_variant import manifest

MANIFEST = manifest("lies_about_bfloat16", platform=without_dtype("bfloat16"))
