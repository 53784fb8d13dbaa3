"""The host as a compute device: how many threads a worker should have. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from srv.platform.facts import DeviceFacts

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PROCESSORS = Path("/sys/devices/system/cpu")
_THREADS = "OMP_NUM_THREADS"


def threads() -> int:
    """Compute threads of a worker: the operator's OMP_NUM_THREADS if that is set, else one a usable core."""
    said = os.environ.get(_THREADS, "")
    return int(said) if said.isdecimal() and int(said) > 0 else usable_cores()


def usable_cores() -> int:
    """Physical cores that this process may use: by its affinity, and by its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = _cores(os.sched_getaffinity(0), _PROCESSORS)
    else:
        import psutil  # a plan for another machine asks nothing of this one

        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(cores, _quota(_CGROUP_QUOTA) or cores))


def _cores(processors: Iterable[int], folder: Path) -> int:
    """Cores that these processors are of, as Linux tells which are siblings; each is one where it does not tell."""
    found: set[str] = set()
    for number in processors:
        try:
            found.add((folder / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii"))
        except OSError:
            found.add(str(number))
    return len(found)


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
