"""The manifest of the NVIDIA CUDA platform; its device code is not implemented yet (`srv.platform.placeholder`).

Imports neither torch nor a vendor's package.
"""

from __future__ import annotations

from srv.platform.manifest import Manifest
from srv_cuda.facts import FACTS, VARIANTS
from srv_cuda.placeholder import create
from srv_cuda.probe import probe

MANIFEST = Manifest(
    name="cuda",
    api=(2, 0),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=100,
    summary="NVIDIA GPUs from compute capability 8.0 (not implemented yet)",
    facts=FACTS,
    probe=probe,
    create=create,
)
