"""The manifest of the CPU platform. Imports no torch: only `create`, in a worker, does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.platform.manifest import EngineContext, Manifest
from srv_cpu.facts import FACTS
from srv_cpu.host import worker_env
from srv_cpu.probe import probe

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def _create(context: EngineContext) -> Platform:
    from srv_cpu.platform import create

    return create(context)


MANIFEST = Manifest(
    name="cpu",
    api=(2, 1),
    core=">=0.1,<0.2",
    variants=("avx2", "avx512", "amx", "neon"),
    priority=0,
    summary="The host's processors, through torch and the kernels of srv-kernels",
    facts=FACTS,
    probe=probe,
    create=_create,
    worker_env=worker_env,
)
