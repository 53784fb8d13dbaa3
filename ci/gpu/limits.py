"""Runs a command under a time limit, and ends it with all processes that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TextIO

GRACE_S = 5.0  # for a server to stop on SIGTERM


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. status: its exit status; None if it was stopped because its time was over."""

    status: int | None
    seconds: float


def run_limited(
    command: Sequence[str],
    log: TextIO,
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    leads: bool = True,
) -> Ended:
    """Run a command, with standard output and error in `log`.

    `leads`: it leads a session of its own, and whatever it leaves running is ended with it. A stage starts its own
    commands without, so that they end with the stage.
    """
    log.flush()
    started = monotonic()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=None if environment is None else {**os.environ, **environment},
        cwd=folder,
        start_new_session=leads,
    )
    try:
        status: int | None = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        (stop_group if leads else stop)(process)
    return Ended(status, monotonic() - started)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and those that it started: SIGTERM, and SIGKILL after a grace period."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process alone: SIGTERM, and SIGKILL after a grace period."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    process.wait()
