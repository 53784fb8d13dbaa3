"""The host as a compute device: how many threads a worker should have. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from srv.platform.facts import DeviceFacts


def usable_cores() -> int:
    """Physical cores among the processors that this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical = psutil.cpu_count(logical=True) or allowed
    physical = psutil.cpu_count(logical=False) or logical
    return max(1, min(allowed, round(allowed * physical / logical)))


def worker_env(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    """One compute thread a core, and none that spins between steps: the API process needs the cores too."""
    return {"OMP_NUM_THREADS": str(usable_cores()), "OMP_WAIT_POLICY": "PASSIVE"}
