"""Runs the probes of plugins, each in its own child process.

A probe may load drivers, crash, hang or print; none of that affects this process. The outcome is always a
`ProbeResult`. The child is `srv.platform.probe_child`; it answers on a dedicated pipe, so its standard output may have
any content: with the line IMPORTED when the manifest is imported, and then with one line of JSON.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from srv.platform.manifest import AUTOLOAD, DEFAULT_TIMEOUT_S, ProbeResult
from srv.platform.probe_child import IMPORTED, ProbeRequest
from srv.platform.registry import InstalledPlatform

ANSWER_LIMIT = 1 << 20  # bytes; a valid answer has a few hundred
STDERR_KEPT = 4096  # bytes kept from the end of a child's standard error, to explain a crash
EXIT_GRACE_S = 1.0  # how long to wait for the exit status of a child that closed its pipe


@dataclass(frozen=True, slots=True)
class _ChildOutput:
    """The output of a child until it answered, closed its pipe, or timed out. imported: whether the manifest was."""

    answer: bytes
    stderr: bytes
    timed_out: bool
    imported: bool


def probe_all(
    platforms: Mapping[str, InstalledPlatform], timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, ProbeResult]:
    """Probe several platforms in parallel; takes as long as the slowest probe, at most about `timeout_s`."""
    if not platforms:
        return {}
    with ThreadPoolExecutor(max_workers=len(platforms), thread_name_prefix="probe") as pool:
        results = pool.map(lambda platform: probe(platform, timeout_s), platforms.values())
        return dict(zip(platforms, results, strict=True))


def probe(platform: InstalledPlatform, timeout_s: float = DEFAULT_TIMEOUT_S) -> ProbeResult:
    """Probe one platform. Never raises because of the plugin."""
    if platform.manifest is None:
        error = platform.error
        reason = (
            "it has no manifest" if error is None else f"refused when it was loaded: {error.member}: {error.reason}"
        )
        return ProbeResult(False, reason, "" if error is None else error.remedy, "plugin_refused")
    read_end, write_end = os.pipe()
    try:
        process = _start(write_end)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    try:
        _send(process, platform, timeout_s)
        output = _read_output(process, read_end, time.monotonic() + timeout_s)
        status = None if output.timed_out or output.answer else _exit_status(process)
    finally:
        os.close(read_end)
        _kill(process)
    return _result(platform, output, status, timeout_s)


def _start(write_end: int) -> subprocess.Popen[bytes]:
    # -P: modules must not be imported from the current directory.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "srv.platform.probe_child", str(write_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(write_end,),
        start_new_session=True,
        env={**os.environ, AUTOLOAD: "0"},
    )


def _send(process: subprocess.Popen[bytes], platform: InstalledPlatform, timeout_s: float) -> None:
    assert process.stdin is not None
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    request = ProbeRequest(platform.name, platform.distribution, platform.target, timeout_s, path)
    # BrokenPipeError: the child has already died; its exit status is reported.
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(msgspec.json.encode(request))


def _read_output(process: subprocess.Popen[bytes], read_end: int, deadline: float) -> _ChildOutput:
    """Read the answer up to its newline, and the tail of standard error, until it is complete or the pipe closes."""
    assert process.stderr is not None
    answer, stderr = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(read_end, selectors.EVENT_READ, answer)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return _output(answer, stderr, timed_out=True)
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                key.data.extend(chunk)
                del stderr[:-STDERR_KEPT]
                if not chunk:
                    selector.unregister(key.fileobj)
            open_ends = {key.fd for key in selector.get_map().values()}
            if b"\n" in answer.removeprefix(IMPORTED) or len(answer) > ANSWER_LIMIT or read_end not in open_ends:
                return _output(answer, stderr, timed_out=False)


def _output(answer: bytearray, stderr: bytearray, timed_out: bool) -> _ChildOutput:
    line = bytes(answer.removeprefix(IMPORTED))
    return _ChildOutput(line, bytes(stderr), timed_out, imported=answer.startswith(IMPORTED))


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status of a child that closed its pipe without an answer; None if it is still running."""
    try:
        return process.wait(EXIT_GRACE_S)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and its descendants. The process group has the child's id, and exists while any member does."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _result(platform: InstalledPlatform, output: _ChildOutput, status: int | None, timeout_s: float) -> ProbeResult:
    report = f"Report this to the maintainer of {platform.distribution}, or uninstall it"
    if output.timed_out and not output.imported:
        return ProbeResult(
            False,
            f"its manifest was not imported within {timeout_s:g} s, so its probe did not run",
            f"Allow it more time with `srv platforms --timeout {4 * timeout_s:g}`; if it is always slow: {report}",
            "manifest_timeout",
        )
    if output.timed_out:
        return ProbeResult(
            False,
            f"its probe did not answer within {timeout_s:g} s",
            f"Allow it more time with `srv platforms --timeout {4 * timeout_s:g}`; if it still hangs: {report}",
            "probe_timeout",
        )
    if not output.answer:
        return ProbeResult(False, f"its probe {_exit_text(status)}{_last_line(output.stderr)}", report, "probe_crashed")
    try:
        return msgspec.json.decode(output.answer, type=ProbeResult)
    except msgspec.DecodeError as error:
        return ProbeResult(False, f"its probe's answer cannot be parsed: {error}", report, "probe_garbage")


def _exit_text(status: int | None) -> str:
    if status is None:
        return "closed its pipe without an answer"
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}"
    return f"ended with status {status} without an answer"


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""
