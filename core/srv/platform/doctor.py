"""Examining one platform for `srv doctor`: alive, in a child process with a time limit.

Whatever a plugin does there, crash and hang among it, comes back as findings. Torch-free; the child is
`srv.platform.doctor_child`. What the environment has to do with it is `srv.platform.environment`'s to say.
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
from srv.platform.finding import STAGES, Finding, Line, Request
from srv.platform.manifest import worker_environment
from srv.platform.registry import Found

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its status (None: it was ended after its time) and its last line on standard error."""

    status: int | None
    last_line: str

    @property
    def text(self) -> str:
        """A clause for an operator ("crashed with SIGSEGV (last line)"); empty for a good end."""
        tail = f" ({self.last_line})" if self.last_line else ""
        if self.status is None:
            return f"did not end in time{tail}"
        if self.status < 0:
            return f"crashed with {signal.Signals(-self.status).name}{tail}"
        return f"ended with status {self.status}{tail}" if self.status else ""


def run_child(
    words: list[str], folder: Path, timeout_s: float, *, given: bytes = b"", environment: Mapping[str, str]
) -> Ended:
    """Run `python -P WORDS` in a session of its own, and end it, with all it has started, after `timeout_s`.

    Standard output goes to the file `stdout` of `folder`.
    """
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("w+b") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", *words],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=dict(environment),
        )
        try:
            process.communicate(given, timeout=timeout_s)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        err.seek(0)
        lines = err.read().decode(errors="replace").strip().splitlines()
    return Ended(status, lines[-1].strip() if lines and status != 0 else "")


def examine(
    found: Found, device: DeviceFacts, options: Mapping[str, Any], timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Finding, ...]:
    """Start the platform as a launch would, with a worker's environment, and say what came of each stage."""
    try:
        environment = {**os.environ, **worker_environment(found.loaded, device)}
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything: that is the finding
        return (Finding("start", "error", f"its worker_env raised {type(error).__name__}: {error}", _blame(found)),)
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    request = Request(found.name, device, dict(options), path)
    with tempfile.TemporaryDirectory(prefix="srv-doctor-") as name:
        folder = Path(name)
        answer = folder / "answer"
        answer.touch()
        words = ["-m", "srv.platform.doctor_child", str(answer)]
        ended = run_child(words, folder, timeout_s, given=msgspec.json.encode(request), environment=environment)
        lines = [msgspec.json.decode(each, type=Line) for each in answer.read_bytes().splitlines()]
    findings = [line.finding for line in lines if line.finding is not None]
    if ended.text:
        findings.append(_broken_off(found, lines[-1].stage if lines else STAGES[0], ended, timeout_s))
    return tuple(findings)


def _broken_off(found: Found, stage: str, ended: Ended, timeout_s: float) -> Finding:
    """The finding for a child that did not come to its end."""
    if ended.status is None:
        detail = f"no answer within {timeout_s:g} s"
        remedy = f"Allow it more time with --timeout {4 * timeout_s:g}; if it still hangs: {_blame(found)}"
    else:
        detail, remedy = f"its process {ended.text}", _blame(found)
    return Finding(stage, "warning" if stage == "diagnosis" else "error", detail, remedy)


def _blame(found: Found) -> str:
    return f"Report this to the maker of {found.distribution}."
