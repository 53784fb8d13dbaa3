"""Examines one platform for `srv doctor`: creates it in a child process with a time limit.

Whatever a plugin does there, including a crash or a hang, is reported as findings. Torch-free; the child is
`srv.platform.doctor_child`. Problems of the Python environment are found by `srv.platform.environment`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from srv.platform.facts import DeviceFacts
from srv.platform.finding import NOT_NEEDED, STAGES, Finding, FindingLine, FindingRequest
from srv.platform.manifest import worker_environment
from srv.platform.registry import InstalledPlatform

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child process ended: its exit status (None: killed after the timeout) and its last line on stderr."""

    status: int | None
    last_line: str

    @property
    def text(self) -> str:
        """A clause for an operator ("crashed with SIGSEGV (last line)"); empty after exit status 0."""
        tail = f" ({self.last_line})" if self.last_line else ""
        if self.status is None:
            return f"did not end in time{tail}"
        if self.status < 0:
            return f"crashed with {signal.Signals(-self.status).name}{tail}"
        return f"ended with status {self.status}{tail}" if self.status else ""


def run_child(
    arguments: list[str], folder: Path, timeout_s: float, *, stdin: bytes = b"", environment: Mapping[str, str]
) -> ChildExit:
    """Run `python -P ARGUMENTS` in its own session and kill it, with its children, after `timeout_s`.

    Standard output is written to the file `stdout` in `folder`.
    """
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("w+b") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=dict(environment),
        )
        try:
            process.communicate(stdin, timeout=timeout_s)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        err.seek(0)
        lines = err.read().decode(errors="replace").strip().splitlines()
    return ChildExit(status, lines[-1].strip() if lines and status != 0 else "")


def examine(
    platform: InstalledPlatform, device: DeviceFacts, options: Mapping[str, Any], timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Finding, ...]:
    """Start the platform as a launch would, with a worker's environment; returns the findings of all stages."""
    try:
        environment = {**os.environ, **worker_environment(platform.loaded, device)}
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is reported
        return (
            Finding(
                "start", "error", f"its worker_env raised {type(error).__name__}: {error}", _report_to_author(platform)
            ),
        )
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    request = FindingRequest(platform.name, device, dict(options), path)
    with tempfile.TemporaryDirectory(prefix="srv-doctor-") as name:
        folder = Path(name)
        answer = folder / "answer"
        answer.touch()
        arguments = ["-m", "srv.platform.doctor_child", str(answer)]
        exited = run_child(arguments, folder, timeout_s, stdin=msgspec.json.encode(request), environment=environment)
        lines = [msgspec.json.decode(line, type=FindingLine) for line in answer.read_bytes().splitlines()]
    findings = [line.finding for line in lines if line.finding is not None]
    if exited.text:
        findings.append(_aborted(platform, lines[-1].stage if lines else STAGES[0], exited, timeout_s))
    return tuple(findings)


def _aborted(platform: InstalledPlatform, stage: str, exited: ChildExit, timeout_s: float) -> Finding:
    """The finding for a child that crashed or was killed after the timeout."""
    if exited.status is None:
        detail = f"no answer within {timeout_s:g} s"
        remedy = (
            f"Allow it more time with --timeout {4 * timeout_s:g}; if it still hangs: {_report_to_author(platform)}"
        )
    else:
        detail, remedy = f"its process {exited.text}", _report_to_author(platform)
    return Finding(stage, "warning" if stage in NOT_NEEDED else "error", detail, remedy)


def _report_to_author(platform: InstalledPlatform) -> str:
    return f"Report this to the maintainer of {platform.distribution}."
