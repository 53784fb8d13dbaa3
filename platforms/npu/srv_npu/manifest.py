"""The Ascend NPU platform, described.

Imports neither torch nor a vendor's package: that is for `create`, in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from srv.platform.facts import DeviceFacts
from srv.platform.manifest import EngineContext, Manifest
from srv_npu.facts import FACTS, VARIANTS
from srv_npu.probe import probe

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_npu.platform import create

    return create(context)


def _worker_env(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    """No backend loads itself with torch: `create` loads the SDK, and says what is wrong where it cannot."""
    return {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


MANIFEST = Manifest(
    name="npu",
    api=(1, 1),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=80,
    summary="Huawei Ascend NPUs of the generations A2 and A3, through torch_npu",
    facts=FACTS,
    probe=probe,
    create=_create,
    worker_env=_worker_env,
)
