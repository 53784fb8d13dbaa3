"""The number of threads that a worker should use, and the memory that it has. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from srv.platform.facts import DeviceFacts

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PROCESSORS = Path("/sys/devices/system/cpu")
_STATUS = Path("/proc/self/status")
_THREADS = "OMP_NUM_THREADS"


def threads() -> int:
    """Compute threads of a worker: OMP_NUM_THREADS if it is set, otherwise one per usable core."""
    value = os.environ.get(_THREADS, "")
    return int(value) if value.isdecimal() and int(value) > 0 else usable_cores()


def share_threads(ranks: int, node_ranks: int | None = None) -> None:
    """Divide the compute threads among the ranks on this host: sets OMP_NUM_THREADS for this process if there are
    several, or if it has been bound to some of the cores.

    `node_ranks`: how many ranks have been bound to the same cores, this one included; None if it has not been bound.
    They get at most one thread per core together.
    """
    if ranks > 1:
        os.environ[_THREADS] = str(max(1, threads() // ranks))
    if node_ranks is not None:
        os.environ[_THREADS] = str(min(threads(), max(1, usable_cores() // node_ranks)))


def usable_cores() -> int:
    """Physical cores that this process may use, according to its CPU affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = _cores(os.sched_getaffinity(0), _PROCESSORS)
    else:
        import psutil  # not needed to plan for another machine

        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(cores, _quota(_CGROUP_QUOTA) or cores))


def _cores(processors: Iterable[int], folder: Path) -> int:
    """Number of cores of these logical processors by Linux's list of thread siblings; one per processor without it."""
    siblings: set[str] = set()
    for number in processors:
        try:
            siblings.add((folder / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii"))
        except OSError:
            siblings.add(str(number))
    return len(siblings)


def _quota(file: Path) -> int | None:
    """The CPU quota of a cgroup (version 2) in whole processors, at least one; None if no limit is known."""
    try:
        quota, _, period = file.read_text(encoding="ascii").partition(" ")
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup file here, or it says "max"
        return None


def worker_env(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    """One compute thread per core. The OpenMP wait policy stays the default: threads that sleep at once wake late."""
    return {_THREADS: str(threads())}


def resident_bytes(status: Path = _STATUS) -> int:
    """Resident memory of this process, without pages of files if the system tells these apart."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    kinds = ("RssAnon:", "RssShmem:")
    sizes = [int(words[1]) * 1024 for line in lines if (words := line.split()) and words[0] in kinds]
    if sizes:
        return sum(sizes)
    import psutil

    return int(psutil.Process().memory_info().rss)
