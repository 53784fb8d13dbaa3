"""The manifest of the AMD ROCm platform.

Imports neither torch nor a vendor's package; `create` does, in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.platform.manifest import EngineContext, Manifest
from srv_gpu.simulator import worker_environment
from srv_rocm.facts import FACTS, VARIANTS
from srv_rocm.probe import probe
from srv_rocm.sensors import sensors

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_rocm.platform import create

    return create(context)


MANIFEST = Manifest(
    name="rocm",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=90,
    summary="AMD GPUs: Instinct MI300 and MI350 series, and Radeon RX 7900; not yet run on real ones",
    facts=FACTS,
    probe=probe,
    create=_create,
    worker_env=worker_environment,
    sensors=sensors,
)
