"""The engine process, `python -m srv.engine.process`; it reads its EngineSpec from standard input.

It sends Ready or LoadFailed, runs the engine loop, and exits when it has drained or its parent process has exited. It
prints no traceback for errors that an operator can fix.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys

from srv.errors import EngineDead, startup_failure
from srv.executor.multi_process import RankStartError
from srv.executor.spec import EngineSpec, decode
from srv.io.channel import EngineChannel
from srv.io.messages import Ended, LoadFailed

logger = logging.getLogger(__name__)

_BUILD_MODULE = "srv.engine.build"


def main() -> int:
    # Ctrl-C and service managers signal the whole process group. The API process decides what happens to running
    # requests and ends this process: with a Drain message, by exiting, or by killing it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # until the engine is built: objects made by imports and model loading stay alive anyway
    # Import the slowest modules while the API process is preparing the spec. An error here is ignored because it
    # will be raised again in _serve, which reports it.
    with contextlib.suppress(Exception):
        importlib.import_module(_BUILD_MODULE)
    payload = sys.stdin.buffer.read()
    if not payload:
        return 1  # the process that started this one has exited already
    spec = decode(payload)
    logging.basicConfig(level=spec.log_level.upper(), format="%(asctime)s engine %(levelname)s %(message)s")
    channel = EngineChannel(spec.to_engine, spec.from_engine)
    try:
        return _serve(spec, channel)
    finally:
        channel.close()
        if os.getppid() != spec.parent:
            channel.remove_directory()


def _serve(spec: EngineSpec, channel: EngineChannel) -> int:
    try:
        from srv.engine.build import build

        engine = build(spec)
    except Exception as error:  # noqa: BLE001 - the launcher must print every error
        channel.send(_failure(error))
        return 1
    channel.send(engine.ready)
    from srv.engine.loop import EngineLoop

    gc.freeze()  # objects loaded so far stay alive, so garbage collections can skip them
    gc.enable()
    try:
        loop = EngineLoop(engine.scheduler, engine.executor, channel, engine.depth, engine.late)
        loop.run(lambda: os.getppid() == spec.parent)
    except EngineDead as error:
        logger.error("the engine ends: %s", error)
        channel.send(Ended(str(error)))
        return 1
    finally:
        engine.executor.close()
    return 0


def _failure(error: Exception) -> LoadFailed:
    if isinstance(error, RankStartError):
        return LoadFailed(error.lines, error.status)
    lines, status = startup_failure(error)
    if status == 1:
        logger.error("the engine could not start", exc_info=error)
    return LoadFailed(lines, status)


if __name__ == "__main__":
    sys.exit(main())
