"""The manifest of the Intel XPU platform; its device code is not implemented yet (`srv.platform.placeholder`).

Imports neither torch nor a vendor's package.
"""

from __future__ import annotations

from srv.platform.manifest import Manifest
from srv_xpu.facts import FACTS, VARIANTS
from srv_xpu.placeholder import create
from srv_xpu.probe import probe

MANIFEST = Manifest(
    name="xpu",
    api=(2, 0),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=70,
    summary="Intel GPUs: Data Center GPU Max and Arc B series (not implemented yet)",
    facts=FACTS,
    probe=probe,
    create=create,
)
