"""The engine process, `python -m srv.engine.process`; it reads its EngineSpec from standard input.

Its arguments are the modules of the ranks that will run in it, to be imported while the EngineSpec is prepared.

It sends Ready or LoadFailed, runs the engine loop, and exits when it has drained or its parent process has exited. It
prints no traceback for errors that an operator can fix.
"""

from __future__ import annotations

import logging
import os
import sys

from srv.errors import EngineDead, StartError, startup_failure
from srv.executor.spec import EngineSpec, decode
from srv.io import child
from srv.io.channel import EngineChannel
from srv.io.messages import Ended, LoadFailed

logger = logging.getLogger(__name__)

_BUILD_MODULE = "srv.engine.build"


def main() -> int:
    payload = child.begin([_BUILD_MODULE, *sys.argv[1:]])
    if not payload:
        return 1  # the process that started this one has exited already
    spec = decode(payload)
    child.log_as("engine", spec.log_level)
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

    child.ready()
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
    lines, status = startup_failure(error)
    if status == 1 and not isinstance(error, StartError):  # a rank has logged its cause
        logger.error("the engine could not start", exc_info=error)
    return LoadFailed(lines, status)


if __name__ == "__main__":
    sys.exit(main())
