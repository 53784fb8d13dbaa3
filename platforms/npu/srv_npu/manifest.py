"""The Ascend NPU platform, described: its device code is not built yet (`srv.platform.unbuilt`).

Imports neither torch nor a vendor's package.
"""

from __future__ import annotations

from srv.platform.manifest import Manifest
from srv_npu.facts import FACTS, VARIANTS
from srv_npu.probe import probe
from srv_npu.unbuilt import create

MANIFEST = Manifest(
    name="npu",
    api=(1, 0),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=80,
    summary="Huawei Ascend NPUs of the generations A2 and A3 (not implemented yet)",
    facts=FACTS,
    probe=probe,
    create=create,
)
