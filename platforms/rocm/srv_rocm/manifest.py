"""The manifest of the AMD ROCm platform; its device code is not implemented yet (`srv.platform.placeholder`).

Imports neither torch nor a vendor's package.
"""

from __future__ import annotations

from srv.platform.manifest import Manifest
from srv_rocm.facts import FACTS, VARIANTS
from srv_rocm.placeholder import create
from srv_rocm.probe import probe

MANIFEST = Manifest(
    name="rocm",
    api=(2, 0),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=90,
    summary="AMD Instinct GPUs of the MI300 and MI350 series (not implemented yet)",
    facts=FACTS,
    probe=probe,
    create=create,
)
