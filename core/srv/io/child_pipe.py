"""Frames to and from a child process over its pipes, with a deadline. Must not know what a frame contains.

Frames and the child's half are in `srv.io.bounded_child`.
"""

from __future__ import annotations

import os
import select
import subprocess
import time

from srv.io.bounded_child import framed

_READ_BYTES = 1 << 20


def send(process: subprocess.Popen[bytes], content: bytes, deadline: float) -> None:
    """Send a frame to the standard input of a child. Raises TimeoutError, or OSError if it has ended."""
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    os.set_blocking(descriptor, False)  # a pipe holds little, and a process that is stopped does not read it
    unsent = memoryview(framed(content))
    while unsent:
        _wait(descriptor, select.POLLOUT, deadline)
        unsent = unsent[os.write(descriptor, unsent) :]


def receive(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The content of the next frame. Raises TimeoutError, or EOFError or OSError if the child has ended."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    received = bytearray()
    while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
        _wait(descriptor, select.POLLIN, deadline)
        if not (chunk := os.read(descriptor, _READ_BYTES)):
            raise EOFError
        received += chunk
    return bytes(received[4:])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child, wait for its end and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # what was not written is lost with the process


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a pipe is ready or closed; TimeoutError after the deadline."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
