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

import resource
import signal
from pathlib import Path
from typing import IO

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


def ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def limit_memory(more: int) -> None:
    """Let this process allocate at most `more` bytes from now on; beyond that Python raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the address space of a process has no useful size
        used = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def limit_time(seconds: float) -> None:
    """Let the system end this process after so much processor time from now on (0: no limit), even within one
    instruction of the interpreter, which no handler in Python could interrupt."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
