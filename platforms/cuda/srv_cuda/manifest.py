"""The manifest of the NVIDIA CUDA platform.

Imports neither torch nor a vendor's package; `create` does, in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.platform.manifest import EngineContext, Manifest
from srv_cuda.facts import FACTS, VARIANTS
from srv_cuda.probe import probe
from srv_cuda.sensors import sensors
from srv_gpu.simulator import worker_environment

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_cuda.platform import create

    return create(context)


MANIFEST = Manifest(
    name="cuda",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=VARIANTS,
    priority=100,
    summary="NVIDIA GPUs from compute capability 8.0; evidence from simulated ones only",
    facts=FACTS,
    probe=probe,
    create=_create,
    worker_env=worker_environment,
    sensors=sensors,
)
