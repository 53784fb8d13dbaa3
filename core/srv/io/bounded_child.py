"""The child's half of `srv.io.bounded_process`: frames, and the limits that the process sets for itself.

The limits hold whatever the parent does. A frame is its length (4 bytes, big-endian) and its content. Must not know
what is computed.

    parent                                     child
    setup ───────────────────────────────────► prepares itself
          ◄─────────────────────────────────── reply
    question ────────────────────────────────► computes the answer
          ◄─────────────────────────────────── reply
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

_UNLIMITED_STACK = 2 * 2**20  # of a thread where the limit on stacks is infinite (glibc)

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # its parent decides when it ends


def read_frame(stream: IO[bytes]) -> bytes:
    """The content of the next frame; b"" at the end of the stream."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 4 else b""


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def write_frame(stream: IO[bytes], content: bytes) -> None:
    stream.write(framed(content))
    stream.flush()


def channels() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output of this process, for frames only: call it before code of others is imported.

    What such code prints goes to standard error from now on, and what it reads is empty.
    """
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return source, sink


def ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def with_small_stack(work: Callable[[], None]) -> int:
    """Run this on a thread with three quarters of the stack that threads have in the parent.

    So recursion that goes well here goes well there: the stack of a main thread may be larger than that of threads.
    Returns an exit status.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    size = _UNLIMITED_STACK if limit == resource.RLIM_INFINITY else limit
    threading.stack_size(max(2**16, size // 4 * 3 // 4096 * 4096))
    ended: list[bool] = []

    def run() -> None:
        work()
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return 0 if ended else 1


def limit_memory(further_bytes: int) -> None:
    """Let this process allocate at most `more` bytes from now on; beyond that Python raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the address space of a process has no useful size
        used = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + further_bytes, used + further_bytes))


def limit_time(seconds: float) -> None:
    """Let the system end this process after so much processor time from now on (0: no limit), even within one
    instruction of the interpreter, which no handler in Python could interrupt."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
