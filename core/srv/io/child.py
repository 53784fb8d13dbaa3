"""Child processes that read a specification from standard input: how they are started, and how they begin.

    parent                                child
    spawn(module) ──────────────────────► begin(modules): imports them, while the parent prepares the specification
    send(process, specification) ───────► ... which it returns

This module must not know what a specification means.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from srv.io.phases import Phase, Phases, since_process_start


def spawn(module: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m module`, with these variables in addition to those of this process."""
    return subprocess.Popen(
        # -P: do not import modules from the current working directory.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def send(process: subprocess.Popen[bytes], specification: bytes) -> None:
    """Send a started process its specification. One that has ended already is noticed by its exit status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(specification)


def exit_status(process: subprocess.Popen[bytes]) -> str | None:
    """The exit status of a process, as "status N" or "signal N"; None while it runs."""
    code = process.poll()
    if code is None:
        return None
    return f"status {code}" if code >= 0 else f"signal {-code}"


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal has stopped the process. Not one that has ended, which `exit_status` tells."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it ended, perhaps since its exit status was asked for
        return False


def begin(modules: Sequence[str], phases: Phases | None = None) -> bytes:
    """Called first in the child: import the slowest modules and return the specification; b"" if the parent is gone.

    `phases`: records how long that takes, and what came before in this process.

    The garbage collector is off until the child is ready, because what imports and loading make stays alive anyway.
    """
    # Ctrl-C and service managers signal the whole process group. The API process decides what happens to running
    # requests and ends its children: with a message, by exiting, or by killing them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # logs the stacks of all threads without the interpreter's help
    gc.disable()
    phases = phases or Phases()
    if (before := since_process_start()) is not None:
        phases.add([Phase("interpreter", before)])
    # What an import raises is raised again where the modules are used, which reports it.
    with phases.run("imports", does="importing modules"), contextlib.suppress(Exception):
        for module in modules:
            importlib.import_module(module)
    return sys.stdin.buffer.read()


def ready() -> None:
    """Called once everything that stays alive is loaded: garbage collections skip it."""
    gc.freeze()
    gc.enable()


def log_as(name: str, level: str) -> None:
    """Log to standard error, with the name of this process."""
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s")
