"""The engine process, `python -m srv.engine.process`; it reads its EngineSpec from standard input.

Its arguments are the modules of the ranks that will run in it, to be imported while the EngineSpec is prepared.

It sends Ready or LoadFailed, runs the engine loop, and exits when it has drained or its parent process has exited. It
prints no traceback for errors that an operator can fix.
"""

from __future__ import annotations

import logging
import os
import sys

from srv.args.extra import start_hooks
from srv.dist.mesh import mesh_of
from srv.engine.agreement import Agreement
from srv.errors import EngineDead, StartError, startup_failure
from srv.executor.spec import EngineSpec, decode
from srv.hooks import EngineStarted, EngineStopped
from srv.io import child
from srv.io.channel import EngineChannel
from srv.io.gc_watch import watch_collections
from srv.io.messages import Ended, LoadFailed, Ready
from srv.io.phases import Phases
from srv.platform.hook_plugins import Hooks

logger = logging.getLogger(__name__)

_BUILD_MODULE = "srv.engine.build"


def main() -> int:
    phases = Phases()
    payload = child.begin([_BUILD_MODULE, *sys.argv[1:]], phases)
    if not payload:
        return 1  # the process that started this one has exited already
    spec = decode(payload, EngineSpec)
    child.log_as("engine" if spec.config.parallel.dp_size == 1 else f"engine {spec.replica}", spec.log_level)
    channel = EngineChannel(spec.to_engine, spec.from_engine)
    try:
        return _serve(spec, channel, phases)
    finally:
        channel.close()
        if os.getppid() != spec.parent:
            channel.remove_directory()


def _serve(spec: EngineSpec, channel: EngineChannel, phases: Phases) -> int:
    try:
        from srv.engine.build import build

        hooks = start_hooks("engine", spec.config.extras)
        engine = build(spec, phases=phases)
    except Exception as error:  # noqa: BLE001 - the launcher must print every error
        channel.send(_failure(error))
        return 1
    channel.send(engine.ready)
    watch_collections(spec.config.observe.gc_warning_threshold_secs)
    stopped = "stopped"
    child.ready()
    agreement: Agreement | None = None
    try:
        _observe_start(hooks, engine.ready)
        agreement = _agreement(spec, channel)
        engine.loop(channel, hooks, agreement).run(lambda: os.getppid() == spec.parent)
    except EngineDead as error:
        logger.error("the engine ends: %s", error)
        stopped = str(error)
        channel.send(Ended(str(error)))
        return 1
    except BaseException as error:
        stopped = f"{type(error).__name__}: {error}"
        raise
    finally:
        engine.executor.close()
        if agreement is not None:
            agreement.close()
        if (observe := hooks.bind("srv_engine_stopped")) is not None:
            observe(EngineStopped(reason=stopped))
    return 0


def _agreement(spec: EngineSpec, channel: EngineChannel) -> Agreement | None:
    """That of replicas which compute each step together; the channel wakes the loop when one of them has work."""
    replicas = mesh_of(spec.config.get).replicas
    if replicas == 1:
        return None
    alive, address = (lambda: os.getppid() == spec.parent), (lambda replica: f"ipc://{spec.meeting}/agree_{replica}")
    agreement = Agreement(spec.replica, replicas, address, alive)
    channel.wake_for(agreement.socket)
    return agreement


def _observe_start(hooks: Hooks, ready: Ready) -> None:
    if (observe := hooks.bind("srv_engine_started")) is not None:
        observe(
            EngineStarted(
                model=ready.model,
                device=ready.device,
                pages=tuple(ready.pages),
                page_size=ready.page_size,
                max_request_tokens=ready.max_request_tokens,
                load_seconds=ready.load_seconds,
            )
        )


def _failure(error: Exception) -> LoadFailed:
    lines, status = startup_failure(error)
    if status == 1 and not isinstance(error, StartError):  # a rank has logged its cause
        logger.error("the engine could not start", exc_info=error)
    return LoadFailed(lines, status)


if __name__ == "__main__":
    sys.exit(main())
