"""The engine process: `python -m srv.engine.process`, its specification on standard input.

It says Ready or LoadFailed, runs the loop, and ends when drained or when its parent is gone. It never
prints a traceback for what an operator can fix.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys

from srv.engine.spec import EngineSpec, decode
from srv.errors import InternalError, Refusal, SrvError
from srv.io.channel import EngineChannel
from srv.io.messages import LoadFailed

logger = logging.getLogger(__name__)

_ENGINE = "srv.engine.build"


def main() -> int:
    # Ctrl-C and service managers signal the whole group; the API process decides what happens to running requests,
    # and ends this one: with Drain, by going away, or by force.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # until the engine is built: what importing and loading make, they keep
    # What takes longest to import, while the specification is made. What fails here fails again where it can be told.
    with contextlib.suppress(Exception):
        importlib.import_module(_ENGINE)
    told = sys.stdin.buffer.read()
    if not told:
        return 1  # whoever started this process is gone already
    spec = decode(told)
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
    except Exception as error:  # noqa: BLE001 - the launcher prints it; nothing may be lost
        channel.send(_failure(error))
        return 1
    channel.send(engine.ready)
    from srv.engine.loop import EngineLoop

    gc.freeze()  # what is loaded by now stays; collections need not look at it again and again
    gc.enable()
    try:
        EngineLoop(engine.scheduler, engine.executor, channel, engine.depth).run(lambda: os.getppid() == spec.parent)
    finally:
        engine.executor.close()
    return 0


def _failure(error: Exception) -> LoadFailed:
    if isinstance(error, Refusal):
        return LoadFailed([str(rejected) for rejected in error.rejections], status=2)
    if isinstance(error, SrvError) and not isinstance(error, InternalError):
        return LoadFailed([str(error)], status=2)
    logger.error("the engine could not start", exc_info=error)
    return LoadFailed([f"the engine could not start: {type(error).__name__}: {error}"], status=1)


if __name__ == "__main__":
    sys.exit(main())
