"""The NVIDIA CUDA platform, described. Imports neither torch nor a vendor's package.

Its device code is not built yet. What is said here is true all the same: `srv plan --device cuda:PROFILE`
resolves from it, the probe tells what this machine lacks (hardware first), and `create`, like every
backend's target, refuses with `not_implemented` before a weight is read.
"""

from __future__ import annotations

from srv.platform.manifest import Manifest
from srv_cuda.facts import FACTS, VARIANTS
from srv_cuda.probe import probe
from srv_cuda.unbuilt import create

MANIFEST = Manifest(
    name="cuda",
    api=(1, 0),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=100,
    summary="NVIDIA GPUs from compute capability 8.0 (not implemented yet)",
    facts=FACTS,
    probe=probe,
    create=create,
)
