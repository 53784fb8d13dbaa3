"""The manifest of the Intel XPU platform.

Imports neither torch nor a vendor's package; `create` does, in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.platform.manifest import EngineContext, Manifest
from srv_gpu.simulator import worker_environment
from srv_xpu.facts import FACTS, VARIANTS
from srv_xpu.probe import probe
from srv_xpu.sensors import sensors

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_xpu.platform import create

    return create(context)


MANIFEST = Manifest(
    name="xpu",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=70,
    summary="Intel GPUs: Data Center GPU Max and Arc B series; not yet run on real ones",
    facts=FACTS,
    probe=probe,
    create=_create,
    worker_env=worker_environment,
    sensors=sensors,
)
