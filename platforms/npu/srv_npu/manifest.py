"""The manifest of the Ascend NPU platform.

It imports neither torch nor a vendor package; `create` does, in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.platform.manifest import EngineContext, Manifest
from srv_npu.facts import FACTS, VARIANTS
from srv_npu.probe import probe

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_npu.platform import create

    return create(context)


MANIFEST = Manifest(
    name="npu",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=80,
    summary="Huawei Ascend NPUs of the generations A2 and A3, through torch_npu",
    facts=FACTS,
    probe=probe,
    create=_create,
)
