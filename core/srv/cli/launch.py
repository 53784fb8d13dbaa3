"""`srv launch`: choose the platform, resolve the arguments, start the engine, serve HTTP until it is stopped.

    user input ──► platform ──► model facts ──► resolve ──► port ──► engine process ──► HTTP
                      every refusal comes before weights are read; exit status 2

This module only connects these parts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from srv.errors import Refusal, StartError
from srv.io.phases import Phase, Phases, since_process_start

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

    from srv.args.groups.server import ServerArgs
    from srv.args.statement import Resolved
    from srv.cli.observation import Observation
    from srv.engine.replicas import Engine
    from srv.planning.resolution import LaunchContext
    from srv.platform.hook_plugins import Hooks
    from srv.server.graceful import GracefulServer
    from srv.server.http.client_keys import ClientKey
    from srv.server.settings import ServerSettings
    from srv.server.text.processor import TextProcessor

logger = logging.getLogger("srv.launch")

REFUSED = 2  # exit status


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import add_arguments
    from srv.cli.dialect import add_dialect

    parser = subparsers.add_parser("launch", help="serve a model", description="Serve a model over HTTP.")
    add_arguments(parser)
    add_dialect(parser)
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    import asyncio  # here and below: `--help` does not need these imports

    from srv.args.extra import start_hooks
    from srv.args.sources import gather
    from srv.cli.observation import Observation
    from srv.planning.resolution import resolve_launch
    from srv.server.http.client_keys import client_keys
    from srv.server.http.keys import api_key, public_without_key
    from srv.server.http.listening import close, listen, tls_options

    phases = Phases()
    if (before := since_process_start()) is not None:
        phases.add([Phase("interpreter", before)])
    try:
        with phases.run("resolve", does="importing modules and reading the model's facts"):
            context = resolve_launch(gather(namespace, os.environ))
    except Refusal as refusal:
        _report(refusal)
        raise
    gc.enable()
    config = context.resolved.config
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr
    )
    log_provenance(context)
    hooks = start_hooks("api", config.extras)
    try:
        key = api_key(context.resolved)
        clients = client_keys(context.resolved)
        if config.server.uds is None and not clients and (warning := public_without_key(config.server.host, key)):
            logger.warning("%s", warning)
        observation = Observation(context.resolved, context.model.name)
        tls = tls_options(context.resolved)
        listener = listen(context.resolved)
    except Refusal as refusal:
        _report(refusal)
        raise
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(context, listener, hooks, key, clients, phases, observation, tls))
    finally:
        close(context.resolved, listener)


def _report(refusal: Refusal) -> None:
    """Pass each refused argument to the hooks of plugins."""
    from srv.platform.hook_plugins import Hooks, hook_plugins

    if (observe := Hooks(hook_plugins()).bind("srv_refused")) is not None:
        from srv.hooks import Refused

        for rejection in refusal.rejections:
            observe(Refused(code=rejection.code, what=rejection.what, status=None, message=str(rejection)))


def log_provenance(context: LaunchContext) -> None:
    from srv.planning.target import device_text

    logger.info("platform %s: %s", device_text(context.platform, context.device), context.reason)
    for note in context.notes:
        logger.warning("%s", note)
    for provenance in context.resolved.provenance.values():
        logger.debug("%s", provenance)
    backends = context.resolved.backends
    logger.info("backends: %s", ", ".join(f"{slot} = {choice.shown}" for slot, choice in backends.items()))
    for choice in backends.values():
        logger.debug("%s", choice)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available on this operating system; asyncio's own loop works too
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def ready_text(model: str, platform: str | None, device: str, seconds: float) -> str:
    """What the log says once the engine is ready. `device`: its PyTorch name, which may be that of another platform."""
    where = device if platform in (None, device.partition(":")[0]) else f"platform {platform} (PyTorch device {device})"
    return f"{model} is ready on {where} after {seconds:.1f} s"


async def _serve(
    context: LaunchContext,
    listener: socket.socket,
    hooks: Hooks,
    key: str | None,
    clients: tuple[ClientKey, ...],
    phases: Phases,
    observation: Observation,
    tls: Mapping[str, Any],
) -> int:
    """Start the engine, load the tokenizer, serve. The engine never outlives this function."""
    import asyncio

    from srv.engine.replicas import make_engine
    from srv.server.start import server_settings, start_engine

    config = context.resolved.config
    engine = make_engine(config)
    stop = _CancelOnSignal()
    served, status = False, 0
    try:
        text = start_engine(engine, context, phases)
        with phases.run("imports", does="importing the HTTP server"):
            await asyncio.to_thread(_import_server)  # while the engine loads
        with phases.run("engine", waits_for="the engine process, whose phases say more"):
            ready = await engine.ready(config.server.engine_start_timeout_seconds)
        logger.info("%s", ready_text(ready.model, context.resolved.platform, ready.device, ready.load_seconds))
        settings = server_settings(context, ready, text, phases, key, clients)
        status = await _serve_http(context.resolved, engine, settings, text, listener, hooks, phases, observation, tls)
        served = True
    except StartError as error:
        for line in (*error.lines, *_model_source(context, error.status)):
            print(f"srv launch: {line}", file=sys.stderr)
        return error.status
    except asyncio.CancelledError:
        if not stop.received:
            raise
        logger.info("stopped before the server was ready")
    finally:
        stop.close()
        engine.close(drained=served)
    return status


def _import_server() -> None:
    """Import the modules that `_serve_http` needs."""
    for name in ("srv.server.app", "srv.server.graceful", "srv.server.http.connection", "uvicorn"):
        importlib.import_module(name)


def _model_source(context: LaunchContext, status: int) -> list[str]:
    """A line that says who set the model, if the engine refused it."""
    if status != REFUSED:
        return []
    provenance = context.resolved.provenance["model_path"]
    model = "the demo model" if provenance.value is None else f"model_path = {provenance.value}"
    return [f"the model is {context.model.name}: {model} (set by {provenance.owner})"]


class _CancelOnSignal:
    """Cancels the start on SIGTERM and SIGHUP while the engine loads. The server handles them once it serves."""

    def __init__(self) -> None:
        import asyncio

        self.received = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._previous = {
            number: signal.signal(number, self._cancel)
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN
        }

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


async def _serve_http(
    resolved: Resolved,
    engine: Engine,
    settings: ServerSettings,
    text: TextProcessor,
    listener: socket.socket,
    hooks: Hooks,
    phases: Phases,
    observation: Observation,
    tls: Mapping[str, Any],
) -> int:
    """Serve until the server is stopped or the engine is lost; returns the exit status."""
    import asyncio

    from srv.server.app import create_app
    from srv.server.client import EngineClient
    from srv.server.http.listening import address
    from srv.server.warmup import GENERATE, warm_up
    from srv.server.watchdog import Watchdog, WatchdogLimits

    config = resolved.config
    client = EngineClient(engine)
    with phases.run("http", does="building the application"):
        app = create_app(settings, client, text, hooks, observation.tracer, observation.recorder)
        server = _http_server(app, config.server, tls)
    for phase in phases.done:
        logger.log(logging.INFO if phase.cause else logging.DEBUG, "start of api, %s", phase)
    receiving = asyncio.create_task(client.run())
    receiving.add_done_callback(lambda _: server.lose_engine())
    limits = WatchdogLimits(config.server.soft_watchdog_timeout, config.server.watchdog_timeout)
    watchdog = Watchdog(client, app.state.lifecycle, limits, engine.dump_stacks, engine.kill)
    watching = asyncio.create_task(watchdog.run())
    gc.freeze()  # objects that exist by now live until the end; later collections skip them
    try:
        first = () if config.server.skip_server_warmup else (GENERATE,)
        await warm_up(app.state.service, (*first, *config.server.warmups))
        logger.info("serving %s on %s", settings.model_name, address(resolved))
        await server.serve(sockets=[listener])
    finally:
        app.state.service.preprocessor.close()
        await asyncio.to_thread(observation.close, server.engine_lost)
        for task in (watching, receiving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return 1 if server.engine_lost else 0


def _http_server(app: FastAPI, server: ServerArgs, tls: Mapping[str, Any]) -> GracefulServer:
    """The HTTP server of an application, before it listens. `tls`: as `tls_options` returns it."""
    import uvicorn

    from srv.server.graceful import GracefulServer
    from srv.server.http.connection import ConnectionLimits, http_protocol

    protocol = http_protocol(
        app.state.service.metrics.responded,
        app.state.refused,
        ConnectionLimits(server.max_connections, server.connection_timeout_seconds),
        server.root_path,
    )
    return GracefulServer(
        uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
            **tls,
        ),
        app.state.lifecycle,
        server.graceful_shutdown_seconds,
        app.state.service.preprocessor.close,
    )
