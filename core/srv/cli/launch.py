"""`srv launch`: choose the platform, resolve the arguments, start the engine, serve HTTP until it is stopped.

    user input ──► platform ──► model facts ──► resolve ──► port ──► engine process ──► HTTP
                      every refusal comes before weights are read; exit status 2

This module only connects these parts.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection, StartError

if TYPE_CHECKING:
    import asyncio

    from srv.args.config import Config
    from srv.args.statement import Resolved
    from srv.engine.supervisor import EngineProcess
    from srv.planning.resolution import LaunchContext
    from srv.platform.hook_plugins import Hooks
    from srv.server.settings import ServerSettings
    from srv.server.text.processor import TextProcessor

logger = logging.getLogger("srv.launch")

REFUSED = 2  # exit status
_BACKLOG = 2048  # connections that wait to be accepted; the default of uvicorn


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
    from srv.planning.resolution import resolve_launch

    try:
        context = resolve_launch(gather(namespace, os.environ))
    except Refusal as refusal:
        _report(refusal)
        raise
    gc.enable()
    config = context.resolved.config
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr
    )
    _log_provenance(context)
    hooks = start_hooks("api", config.extras)
    try:
        listener = _listen(context.resolved)
    except Refusal as refusal:
        _report(refusal)
        raise
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(context, listener, hooks))
    finally:
        listener.close()


def _report(refusal: Refusal) -> None:
    """Pass each refused argument to the hooks of plugins."""
    from srv.platform.hook_plugins import Hooks, hook_plugins

    if (observe := Hooks(hook_plugins()).bind("srv_refused")) is not None:
        from srv.hooks import Refused

        for each in refusal.rejections:
            observe(Refused(code=each.code, what=each.what, status=None, message=str(each)))


def _log_provenance(context: LaunchContext) -> None:
    logger.info("platform %s: %s", context.platform, context.reason)
    for note in context.notes:
        logger.warning("%s", note)
    for provenance in context.resolved.provenance.values():
        logger.debug("%s", provenance)
    for choice in context.resolved.backends.values():
        logger.info("%s", choice)


def _listen(resolved: Resolved) -> socket.socket:
    """Open the port before anything slow is started.

    The socket listens immediately: two sockets that are only bound would share the port, and the second server would
    fail only after it has loaded its weights. Until the server is ready, connections wait in the backlog.
    """
    host, port = resolved.config.server.host, resolved.config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Refusal([_cannot_listen(resolved, error)]) from error
    return listener


def _cannot_listen(resolved: Resolved, error: OSError) -> Rejection:
    """The rejection of the host or of the port, whichever is the cause, with its source."""
    host, port = resolved.config.server.host, resolved.config.server.port
    reason = f"srv cannot listen on {host}:{port}: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "Set --host to an address of this machine (127.0.0.1: this machine only, 0.0.0.0: all networks)."
        return Rejection("host_unavailable", "host", host, resolved.provenance["host"].owner, reason, remedy)
    remedy = "Stop the process that uses it, or choose another port with --port (or --host)."
    return Rejection("port_unavailable", "port", str(port), resolved.provenance["port"].owner, reason, remedy)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available on this operating system; asyncio's own loop works too
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


async def _serve(context: LaunchContext, listener: socket.socket, hooks: Hooks) -> int:
    """Start the engine, load the tokenizer, serve. The engine never outlives this function."""
    import asyncio

    from srv.engine.supervisor import EngineProcess
    from srv.server.start import server_settings, start_engine

    config = context.resolved.config
    engine = EngineProcess()
    sigterm = _CancelOnSigterm()
    served, status = False, 0
    try:
        text = start_engine(engine, context)
        await asyncio.to_thread(_import_server)  # while the engine loads
        ready = await engine.ready(config.server.engine_start_timeout_seconds)
        logger.info("%s is ready on %s after %.1f s", ready.model, ready.device, ready.load_seconds)
        settings = server_settings(context, ready, text.vocab_size)
        status = await _serve_http(config, engine, settings, text, listener, hooks)
        served = True
    except StartError as error:
        for line in (*error.lines, *_model_source(context, error.status)):
            print(f"srv launch: {line}", file=sys.stderr)
        return error.status
    except asyncio.CancelledError:
        if not sigterm.received:
            raise
        logger.info("stopped before the server was ready")
    finally:
        sigterm.close()
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
    named = "the demo model" if provenance.value is None else f"model_path = {provenance.value}"
    return [f"the model is {context.model.name}: {named} (set by {provenance.owner})"]


class _CancelOnSigterm:
    """Cancels the start on SIGTERM while the engine loads. Once HTTP is served, the server has its own handler."""

    def __init__(self) -> None:
        import asyncio

        self.received = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._previous = signal.signal(signal.SIGTERM, self._cancel)

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._previous)


async def _serve_http(
    config: Config,
    engine: EngineProcess,
    settings: ServerSettings,
    text: TextProcessor,
    listener: socket.socket,
    hooks: Hooks,
) -> int:
    """Serve until the server is stopped or the engine is lost; returns the exit status."""
    import asyncio

    import uvicorn

    from srv.server.app import create_app
    from srv.server.client import EngineClient
    from srv.server.graceful import GracefulServer
    from srv.server.http.connection import http_protocol

    client = EngineClient(engine)
    app = create_app(settings, client, text, hooks)
    server = GracefulServer(
        uvicorn.Config(
            app,
            http=http_protocol(app.state.service.metrics.responded, app.state.refused),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        ),
        app.state.lifecycle,
        config.server.graceful_shutdown_seconds,
    )
    receiving = asyncio.create_task(client.run())
    receiving.add_done_callback(lambda _: server.lose_engine())
    gc.freeze()  # objects that exist by now live until the end; later collections skip them
    try:
        host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
        logger.info("serving %s on http://%s:%d", settings.model_name, host, config.server.port)
        await server.serve(sockets=[listener])
    finally:
        app.state.service.preprocessor.close()
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
    return 1 if server.engine_lost else 0
