"""The child processes of a run: how they are started, asked and ended.

Child ──► start ──► spawn            a new interpreter
                    Template.fork    a fork of a process that has imported torch and srv, with the same environment
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from srv.platform.manifest import AUTOLOAD

CHILD = "srv.testing.conformance.child"
_TEMPLATE = "srv.testing.conformance.template"
_EXIT_GRACE_S = 1.0
_OUTPUT_KEPT_BYTES = 4096
STEP_S = 0.5  # between two looks at the time that a process has used
_COMPUTES = 0.02  # of a processor: a process that gets less waits for something else


class ChildFailed(Exception):
    """The child did not answer: it crashed or hung.

    The message is a predicate without a subject, such as "did not end within 60 s".
    """


class Process(Protocol):
    """A process that leads a process group."""

    def kill(self) -> None:
        """Kill it and its children, and wait for it; no effect if it has ended."""

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None if it runs on after so many seconds."""

    def processor_seconds(self) -> float:
        """The processor time that it has used, without that of other processes; 0.0 if it is not known."""


class ModuleStart(Protocol):
    """Starts a module with an environment, standard input and output, and the pipe for its answers."""

    def __call__(self, module: str, environment: Mapping[str, str], stdin: int, output: int, answers: int) -> Process:
        """The module's `main` gets the number of the pipe as its argument."""


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def processor_seconds(self) -> float:
        return _processor_seconds(self._process.pid)


def _processor_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # another operating system, or the process has ended
        return 0.0


class Allowance:
    """The time that a process has left of `seconds`: of the processor while it computes, of the clock while it waits.

    So a process that a busy machine lets wait for a processor is not taken for one that hangs.
    """

    def __init__(self, seconds: float, processor_seconds: Callable[[], float]) -> None:
        self._left, self._processor_seconds = seconds, processor_seconds
        self._clock, self._used = time.monotonic(), processor_seconds()

    def left(self) -> float:
        """Seconds; to be asked every `STEP_S` or so."""
        clock, used = time.monotonic(), self._processor_seconds()
        passed, computed = clock - self._clock, used - self._used
        self._left -= computed if computed > passed * _COMPUTES else passed
        self._clock, self._used = clock, used
        return self._left


def spawn(module: str, environment: Mapping[str, str], stdin: int, output: int, answers: int) -> Process:
    """ModuleStart a new interpreter."""
    # -P: nothing is imported from the current folder.
    command = [sys.executable, "-P", "-m", module, str(answers)]
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        pass_fds=(answers,),
        start_new_session=True,
        env=dict(environment),
    )
    return _Spawned(process)


class _Forked:
    """A process that a template forked: `status` has a line with its id, and one with its exit status at its end."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._received = b""
        self._closed = False

    def _lines(self, count: int, seconds: float) -> list[str]:
        """The lines on the pipe, once there are `count`, the pipe is closed, or the time is over."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            if not self._closed:
                selector.register(self._status, selectors.EVENT_READ)
            while not self._closed and self._received.count(b"\n") < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                chunk = os.read(self._status, 64)
                self._received += chunk
                if not chunk:
                    selector.unregister(self._status)
                    os.close(self._status)
                    self._closed = True
        return self._received.decode().splitlines()

    def kill(self) -> None:
        lines = self._lines(1, 0.0)
        if len(lines) == 1 and not self._closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(lines[0]), signal.SIGKILL)
            self._lines(3, _EXIT_GRACE_S)
        if not self._closed:
            os.close(self._status)
            self._closed = True

    def wait(self, seconds: float) -> int | None:
        lines = self._lines(3, seconds)
        return int(lines[1]) if len(lines) > 1 else None

    def processor_seconds(self) -> float:
        lines = self._lines(1, 0.0)
        return _processor_seconds(int(lines[0])) if lines else 0.0


class Template:
    """A process that has imported modules, with an environment that whatever they load has read.

    `fork` is a `ModuleStart`.

    It ends with this process, and with it what it has forked.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _TEMPLATE, str(other.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
                env=dict(environment),
            )

    def fileno(self) -> int:
        """The socket, with which other processes can fork as well: see `fork`."""
        return self._control.fileno()

    def fork(self, module: str, environment: Mapping[str, str], stdin: int, output: int, answers: int) -> Process:
        """ModuleStart a fork. If the template has ended, it is a process that has ended."""
        return fork(self._control, module, environment, stdin, output, answers)

    def close(self) -> None:
        """End the template."""
        self._control.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def fork(
    control: socket.socket, module: str, environment: Mapping[str, str], stdin: int, output: int, answers: int
) -> Process:
    """Have the template at the other end of a socket start a fork."""
    read_end, write_end = os.pipe()
    message = json.dumps({"module": module, "environment": dict(environment)}).encode()
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [message], [stdin, output, answers, write_end])
    finally:
        os.close(write_end)
    return _Forked(read_end)


class Child:
    """One child process. If `ask` or `answer` raises ChildFailed, the child has been terminated.

    module: what it runs, with `srv.testing.conformance.child.serve`. rank, ranks: as in `Kit`.
    """

    def __init__(
        self,
        device: str,
        scratch: str,
        environment: Mapping[str, str],
        module: str = CHILD,
        rank: int = 0,
        ranks: int = 1,
        start: ModuleStart = spawn,
    ) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._read_end, write_end = os.pipe()
        stdin, requests = os.pipe()
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._received = bytearray()
        try:
            self._process = start(
                module, child_environment(scratch, environment), stdin, self._output.fileno(), write_end
            )
        finally:
            os.close(write_end)
            os.close(stdin)
        path = [os.path.abspath(entry) for entry in sys.path]
        setting = {"device": device, "scratch": scratch, "path": path, "rank": rank, "ranks": ranks}
        self.send(json.dumps(setting))

    def ask(self, request: str, seconds: float) -> dict[str, Any]:
        """The answer to one request. Raises ChildFailed if there is none within `seconds` (see `Allowance`)."""
        self.send(request)
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The answer to the oldest request that was sent. Raises ChildFailed if there is none within `seconds`."""
        allowance = Allowance(seconds, self._process.processor_seconds)
        while b"\n" not in self._received:
            if not self._receive(allowance):
                self.close()
                raise ChildFailed(f"did not end within {seconds:g} s, so its process was terminated")
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _receive(self, allowance: Allowance) -> bool:
        """Read available output; False if no time is left. Raises ChildFailed if the child has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_end, selectors.EVENT_READ)
            while not selector.select(min(STEP_S, max(0.0, allowance.left()))):
                if allowance.left() <= 0:
                    return False
        chunk = os.read(self._read_end, 1 << 16)
        if not chunk:
            description = self._describe_exit()
            self.close()
            raise ChildFailed(description)
        self._received.extend(chunk)
        return True

    def send(self, line: str) -> None:
        """Send one request without waiting for its answer."""
        with suppress(BrokenPipeError):  # `_receive` reports a child that has ended
            self._requests.write(f"{line}\n".encode())

    def _describe_exit(self) -> str:
        """How the process ended, and its last line of output."""
        status = self._process.wait(_EXIT_GRACE_S)
        if status is None:
            return "closed the pipe to the kit"
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _OUTPUT_KEPT_BYTES))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        how = (
            f"crashed its process with {signal.Signals(-status).name}"
            if status < 0
            else f"ended its process with status {status}"
        )
        return f"{how}; last line: {lines[-1].strip()}" if lines else how

    def close(self) -> None:
        """Terminate the child and its children, which are in its process group."""
        self._process.kill()
        self._requests.close()
        if not self._output.closed:
            self._output.close()
            os.close(self._read_end)


def child_environment(scratch: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with that of the plugin's workers, which autoloads no plugin of torch."""
    return {**os.environ, AUTOLOAD: "0", "TMPDIR": scratch, **environment}
