"""`srv launch`: choose the platform, resolve the arguments, start the engine, serve HTTP until told to stop.

    user input ──► platform ──► model facts ──► resolve ──► port ──► engine process ──► HTTP
                      what can be refused is refused before weights are read; exit status 2

The module wires parts together and owns none of their concerns.
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
import time
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejected

if TYPE_CHECKING:
    import asyncio

    from srv.args.config import Config
    from srv.args.statement import Resolved
    from srv.cli.survey import Situation
    from srv.engine.spec import EngineSpec
    from srv.engine.supervisor import EngineProcess
    from srv.io.messages import Ready
    from srv.server.settings import ServerSettings
    from srv.server.text import TextProcessor

logger = logging.getLogger("srv.launch")

REFUSED = 2  # exit status
_BACKLOG = 2048  # connections that wait to be accepted; uvicorn's own figure


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import add_arguments
    from srv.cli.dialect import add_dialect

    parser = subparsers.add_parser("launch", help="serve a model", description="Serve a model over HTTP.")
    add_arguments(parser)
    add_dialect(parser)
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    import asyncio  # here and below: help need not wait for it

    from srv.cli.survey import survey

    situation = survey(namespace, os.environ)
    gc.enable()
    config = situation.resolved.config
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr
    )
    _log_stories(situation)
    listener = _listen(situation.resolved)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(situation, listener))
    finally:
        listener.close()


def _log_stories(situation: Situation) -> None:
    logger.info("platform %s: %s", situation.platform, situation.why)
    for note in situation.notes:
        logger.warning("%s", note)
    for story in situation.resolved.stories.values():
        logger.debug("%s", story)
    for choice in situation.resolved.backends.values():
        logger.info("%s", choice)


def _listen(resolved: Resolved) -> socket.socket:
    """Take the port before anything slow is started.

    It listens at once: two sockets that only bind would share the port, and the second server would learn of the
    first when its weights are loaded. Until then connections wait in the backlog.
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


def _cannot_listen(resolved: Resolved, error: OSError) -> Rejected:
    """Whether it is the host or the port that is at fault, and who said it."""
    host, port = resolved.config.server.host, resolved.config.server.port
    reason = f"{host}:{port} cannot be listened on: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "Give an address of this machine with --host (127.0.0.1: this machine only, 0.0.0.0: every network)."
        return Rejected("host_unavailable", "host", host, resolved.stories["host"].owner, reason, remedy)
    remedy = "Stop what uses it, or choose another with --port (or --host)."
    return Rejected("port_unavailable", "port", str(port), resolved.stories["port"].owner, reason, remedy)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on this operating system; asyncio's own loop serves as well
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


async def _serve(situation: Situation, listener: socket.socket) -> int:
    """Start the engine, load the tokenizer, serve; the engine never outlives this function."""
    import asyncio

    from srv.engine.supervisor import EngineProcess, EngineStartError
    from srv.platform.manifest import worker_environment

    config = situation.resolved.config
    engine = EngineProcess()
    told = _CancelOnSigterm()
    served, status = False, 0
    try:
        engine.start(worker_environment(situation.manifest, situation.device))
        from srv.server.tokenizer import load_text_processor

        # The tokenizer while the engine's modules load: what is wrong with it is told before weights are read.
        text = load_text_processor(situation.model, config.model.tokenizer_path, _text(config.model.chat_template))
        engine.tell(lambda to, back: engine_spec(situation, to, back))
        await asyncio.to_thread(_import_server)  # while the engine loads
        ready = await engine.ready(config.server.engine_start_timeout_seconds)
        logger.info("%s is ready on %s after %.1f s", ready.model, ready.device, ready.load_seconds)
        status = await _serve_http(config, engine, _settings(situation, ready, text.vocab_size), text, listener)
        served = True
    except EngineStartError as error:
        for line in (*error.lines, *_whose(situation, error.status)):
            print(f"srv launch: {line}", file=sys.stderr)
        return error.status
    except asyncio.CancelledError:
        if not told.came:
            raise
        logger.info("stopped before the server was ready")
    finally:
        told.close()
        engine.close(drained=served)
    return status


def _import_server() -> None:
    """What `_serve_http` is made of."""
    for name in ("srv.server.app", "srv.server.graceful", "uvicorn"):
        importlib.import_module(name)


def _whose(situation: Situation, status: int) -> list[str]:
    """Who named the model, if it is what the engine refused."""
    if status != REFUSED:
        return []
    story = situation.resolved.stories["model_path"]
    named = "the demo model" if story.value is None else f"model_path = {story.value}"
    return [f"the model is {situation.model.name}: {named} (set by {story.owner})"]


class _CancelOnSigterm:
    """SIGTERM while the engine loads gives the start up. While HTTP is served the server has a handler of its own."""

    def __init__(self) -> None:
        import asyncio

        self.came = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._before = signal.signal(signal.SIGTERM, self._come)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _text(path: object) -> str | None:
    return None if path is None else str(path)


def engine_spec(situation: Situation, to_engine: str, from_engine: str) -> EngineSpec:
    """What the engine process is told, from what was surveyed and the two sockets' addresses."""
    from srv.engine.spec import EngineSpec

    resolved = situation.resolved
    backends = {slot: (choice.spec.name, choice.spec.target) for slot, choice in resolved.backends.items()}
    reserved = resolved.quantities["reserved_memory"].total if "reserved_memory" in resolved.quantities else 0.0
    return EngineSpec(
        platform=situation.platform,
        device=situation.device,
        model=situation.model,
        config=resolved.config.to_json(),
        backends=backends,
        kv_order=resolved.backends["prefill_attention_backend"].spec.kv_order,
        reserved_bytes=reserved,
        options={name: resolved.config.get(name) for name in situation.manifest.options},
        to_engine=to_engine,
        from_engine=from_engine,
        log_level=resolved.config.server.log_level,
        parent=os.getpid(),
    )


def _settings(situation: Situation, ready: Ready, vocab_size: int) -> ServerSettings:
    from srv import __version__
    from srv.server.settings import ServerSettings

    config, model = situation.resolved.config, situation.model
    return ServerSettings(
        model_name=config.model.served_model_name or model.name,
        context_length=config.model.context_length or model.context_length,
        max_request_tokens=ready.max_request_tokens,
        vocab_size=min(vocab_size, model.vocab_size),
        api_key=config.server.api_key,
        max_request_bytes=config.server.max_request_bytes,
        max_stop_strings=config.server.max_stop_strings,
        random_seed=config.model.random_seed,
        created=int(time.time()),
        model_info={
            "model_path": model.path,
            "architecture": model.architecture,
            "format": model.format,
            "quantization": model.quantization,
            "parameters": model.parameters,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "end_tokens": list(model.end_tokens),
        },
        server_info={
            "version": __version__,
            "platform": situation.platform,
            "device": asdict(situation.device),
            "chosen_because": situation.why,
            "arguments": situation.resolved.describe(),
            "backends": {slot: str(choice) for slot, choice in situation.resolved.backends.items()},
            "quantities": {name: str(quantity) for name, quantity in situation.resolved.quantities.items()},
            "budget": dict(ready.budget),
            "pages": ready.pages,
            "page_size": ready.page_size,
            "graph_rows": ready.graph_rows,
            "load_seconds": round(ready.load_seconds, 3),
        },
    )


async def _serve_http(
    config: Config, engine: EngineProcess, settings: ServerSettings, text: TextProcessor, listener: socket.socket
) -> int:
    """Serve until told to stop, or until the engine is lost; the exit status."""
    import asyncio

    import uvicorn

    from srv.server.app import create_app
    from srv.server.client import EngineClient
    from srv.server.graceful import GracefulServer

    client = EngineClient(engine)
    app = create_app(settings, client, text)
    server = GracefulServer(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5),
        app.state.lifecycle,
        config.server.graceful_shutdown_seconds,
    )
    receiving = asyncio.create_task(client.run())
    receiving.add_done_callback(lambda _: server.lose_engine())
    gc.freeze()  # what is loaded by now stays; collections need not look at it again and again
    try:
        host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
        logger.info("serving %s on http://%s:%d", settings.model_name, host, config.server.port)
        await server.serve(sockets=[listener])
    finally:
        app.state.service.intake.close()
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
    return 1 if server.engine_lost else 0
