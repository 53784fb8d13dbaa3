"""The manifest imports torch, so reading it takes seconds, and fails if torch cannot be loaded.

Caught by manifest.import_purity at L0, naming "imports torch".
"""

from __future__ import annotations

import torch  # the fault
from toy_variant import manifest

MANIFEST = manifest("imports_torch", summary=f"needs torch {torch.__version__}")
