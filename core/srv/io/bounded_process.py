"""A process for work on untrusted input, which may not use much time or memory, and may crash.

Owns that process: its start, its limits, its loss. Must not know what is computed. The child's half is
`srv.io.bounded_child`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from srv.io.child_pipe import end, receive, send

_START_SECONDS = 60.0  # for the process to import what it needs and to prepare itself, on a busy machine


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Per question. `seconds` bounds what `processor_seconds` does not: a process that is stopped or starved."""

    processor_seconds: float = 5.0
    seconds: float = 60.0
    memory_bytes: int = 512 * 2**20


class Lost(Exception):
    """The process gave no reply; the message says why, as a clause about the work.

    `retry`: the machine is at fault: it was busy, or ended the process. Else it was the question.
    """

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class BoundedProcess:
    """One child process. Thread-safe; answers one question at a time.

    module: runs as `python -m`. setup: its first frame. refusal(reply): why the child cannot work, from its reply to
    the setup; "" if it can. work: what the process does, in errors ("renders it"). A process that exceeds a limit is
    lost, and the next question starts another one.
    """

    def __init__(
        self, module: str, setup: bytes, limits: WorkLimits, work: str, refusal: Callable[[bytes], str]
    ) -> None:
        self._module, self._setup, self._limits, self._work, self._refusal = module, setup, limits, work, refusal
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process now instead of at the first question. Raises Lost if it does not start, or refuses."""
        with self._lock:
            if self._process is None:
                self._start()

    def ask(self, question: bytes) -> bytes:
        """The reply. Raises Lost."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(question, self._limits.seconds)

    def close(self) -> None:
        """End the process, also while it works, and the question then fails.

        The asking thread closes the pipes: another file could get the number of one that it still uses.
        """
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        if self._lock.acquire(blocking=False):
            try:
                if self._stop is not None:
                    self._stop()
            finally:
                self._lock.release()

    def _start(self) -> None:
        if self._closed:
            raise Lost("the server is shutting down", retry=True)
        # -P: do not import modules from the current working directory.
        command = [sys.executable, "-P", "-m", self._module]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise Lost(f"no process for it could be started: {error}", retry=True) from None
        self._process, self._stop = process, weakref.finalize(self, end, process)
        refusal = self._refusal(self._ask(self._setup, _START_SECONDS))
        if refusal:
            self._forget()
            raise Lost(refusal, retry=False)

    def _ask(self, frame: bytes, seconds: float) -> bytes:
        """Send a frame and return the reply. Raises Lost, and ends the process, if none comes in time."""
        process, deadline = self._process, time.monotonic() + seconds
        assert process is not None
        try:
            send(process, frame, deadline)
            return receive(process, deadline)
        except TimeoutError:
            raise self._forget(timed_out_after=seconds) from None
        except (OSError, EOFError, ValueError):  # ValueError: `close` has closed the pipes
            raise self._forget() from None

    def _forget(self, timed_out_after: float | None = None) -> Lost:
        """End the process and return the reason for which it gave no reply."""
        process, self._process = self._process, None
        assert process is not None
        assert self._stop is not None
        if timed_out_after is not None:
            process.kill()
        elif not self._closed:
            process.wait(self._limits.seconds)  # its output has ended, so it exits
        self._stop()
        if timed_out_after is not None:
            return Lost(f"the machine is busy: it took more than {timed_out_after:g} seconds", retry=True)
        if process.returncode == -signal.SIGPROF:
            limit = self._limits.processor_seconds
            return Lost(f"it needs more than {limit:g} seconds of processor time", retry=False)
        if process.returncode == -signal.SIGSEGV:
            return Lost(f"the process that {self._work} crashed, perhaps because it is nested too deeply", retry=False)
        killed = process.returncode == -signal.SIGKILL  # as a system without memory does
        return Lost(f"the process that {self._work} ended (status {process.returncode})", retry=killed)
