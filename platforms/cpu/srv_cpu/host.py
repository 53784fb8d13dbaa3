"""The host as a compute device: how many threads a worker should have. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from srv.platform.facts import DeviceFacts

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_THREADS = "OMP_NUM_THREADS"


def threads() -> int:
    """Compute threads of a worker: the operator's OMP_NUM_THREADS if that is set, else one a usable core."""
    said = os.environ.get(_THREADS, "")
    return int(said) if said.isdecimal() and int(said) > 0 else usable_cores()


def usable_cores() -> int:
    """Physical cores that this process may use: by its affinity, and by its container's quota."""
    import psutil  # a plan for another machine asks nothing of this one

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical = psutil.cpu_count(logical=True) or allowed
    physical = psutil.cpu_count(logical=False) or logical
    return max(1, min(allowed, round(allowed * physical / logical), _quota(_CGROUP_QUOTA) or allowed))


def _quota(file: Path) -> int | None:
    """Whole processors' worth of time that a cgroup (version 2) grants, at least one; None: no limit is known."""
    try:
        granted, _, period = file.read_text(encoding="ascii").partition(" ")
        return max(1, int(granted) // int(period))
    except (OSError, ValueError):  # no cgroup file here, or it says "max"
        return None


def worker_env(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    """One compute thread a core. How they wait is left to the runtime: sleeping at once, they wake too late."""
    return {_THREADS: str(threads())}
