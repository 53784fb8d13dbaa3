"""A process that has imported what checks need, and forks a process for each request: importing torch takes seconds.

Started as `python -m srv.testing.conformance.template FD MODULE...`. FD: a socket; each message is a JSON object with
"module" and "environment", and carries four descriptors: the standard input and output of the new process, the pipe for
its answers, and a pipe on which this process writes its id and, when it has ended, its status. No plugin is imported
here, and no thread runs, so that a fork is like a process that was started anew with the same environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

_MESSAGE_BYTES = 1 << 18
_DESCRIPTORS = 4


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for module in sys.argv[2:]:
        with suppress(Exception):  # the check that needs it fails by the same error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    forked = _Server(control).serve()
    return 0 if forked is None else forked()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write)
        self._statuses: dict[int, int] = {}  # process id -> pipe

    def serve(self) -> Callable[[], int] | None:
        """Fork until the socket is closed, which returns None. In a forked process: what it has to run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._control in ready:
                    message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _DESCRIPTORS)
                    if not message:
                        return None
                    if run := self._fork(message, descriptors):
                        return run

    def _fork(self, message: bytes, descriptors: Sequence[int]) -> Callable[[], int] | None:
        stdin, output, answers, status = descriptors
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            self._close()
            os.dup2(stdin, 0)
            for standard in (1, 2):
                os.dup2(output, standard)
            for descriptor in (stdin, output, status):
                os.close(descriptor)
            return lambda: _run(message, answers)
        with suppress(OSError):  # the new process has done it, or has ended
            os.setpgid(process, process)
        for descriptor in (stdin, output, answers):
            os.close(descriptor)
        self._statuses[process] = status
        with suppress(BrokenPipeError):
            os.write(status, f"{process}\n".encode())
        return None

    def _reap(self) -> None:
        """Report the status of each process that has ended."""
        while self._statuses:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            pipe = self._statuses.pop(process)
            with suppress(BrokenPipeError):
                os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(pipe)

    def _close(self) -> None:
        """Give up, in a forked process, what belongs to the template."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (self._wake_read, self._wake_write, *self._statuses.values()):
            os.close(descriptor)


def _run(message: bytes, answers: int) -> int:
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], str(answers)]
    status: int = pkgutil.resolve_name(f"{request['module']}:main")()
    return status


if __name__ == "__main__":
    sys.exit(main())
