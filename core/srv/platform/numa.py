"""NUMA nodes of this host: which there are, and binding this process to one (`--numa-node`). Linux only; no torch.

    /sys/devices/system/node/node1/cpulist    16-31,48-63
    sched_setaffinity                         of every thread that runs already; later ones inherit it
    set_mempolicy(MPOL_PREFERRED)             of this thread, and of threads that it starts from now on

Memory is preferred, not bound: if the node is full, the kernel takes another one instead of killing the process. The
system call is made directly, because libnuma is on few machines; where it is refused (some container runtimes do), the
log says so. https://docs.kernel.org/admin-guide/mm/numa_memory_policy.html
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from srv.errors import InternalError

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
_PREFERRED = 1  # MPOL_PREFERRED
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def existing_nodes(root: Path = NODES) -> tuple[int, ...]:
    """The numbers of this host's nodes, ascending; () if it does not say."""
    numbers = (re.fullmatch(r"node(\d+)", path.name) for path in (root.iterdir() if root.is_dir() else ()))
    return tuple(sorted(int(match[1]) for match in numbers if match))


def processors(node: int, root: Path = NODES) -> frozenset[int]:
    """The logical processors of a node; empty if it has none, or does not exist."""
    with contextlib.suppress(OSError):
        return parse_list((root / f"node{node}" / "cpulist").read_text(encoding="ascii"))
    return frozenset()


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list of the kernel, such as "0-2,5"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def why_unfit(node: int, root: Path = NODES) -> str | None:
    """Why this process cannot run on a node: a clause that names what exists; None if it can."""
    nodes = existing_nodes(root)
    if not nodes:
        return f"this host shows no NUMA nodes ({root})"
    if node not in nodes:
        node_list = ", ".join(map(str, nodes))
        return (
            f"there is no NUMA node {node}; this host has {'the node' if len(nodes) == 1 else 'the nodes'} {node_list}"
        )
    usable = os.sched_getaffinity(0)
    if not processors(node, root) & usable:
        return f"this process may use none of the processors of NUMA node {node}, only {shown(usable)}"
    return None


def bind_process(node: int, root: Path = NODES) -> None:
    """Run this process on the node's processors, as far as it may use them, and prefer the node's memory.

    Threads that run already keep their memory policy. Raises InternalError for an unfit node, which a launch refuses.
    """
    if (reason := why_unfit(node, root)) is not None:
        raise InternalError(f"cannot bind to NUMA node {node}: {reason}")
    usable = processors(node, root) & os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), usable)
    failure = _prefer_memory(node)
    memory = "its memory is preferred" if failure is None else f"its memory is not preferred: {failure}"
    logger.info("bound to NUMA node %d: processors %s; %s", node, shown(usable), memory)


def _prefer_memory(node: int) -> str | None:
    """Why the memory policy of this thread was not set; None if it was."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"srv does not know the system call on {platform.machine()}"
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << node % _BITS
    library = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than this number.
    if library.syscall(ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(words * _BITS + 1)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def shown(numbers: Collection[int]) -> str:
    """As the kernel writes them: "0-2,5"."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _ranges(sorted(numbers)))


def _ranges(ascending: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in ascending:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
