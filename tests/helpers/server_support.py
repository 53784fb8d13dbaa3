"""A server with a fake engine in this event loop, with or without a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.app import ServerSettings, create_app
from srv.server.client import EngineClient
from srv.server.http.connection import DEFAULT_LIMITS, ConnectionLimits, http_protocol
from srv.testing.fake_engine import HIDDEN, ByteTokenizer, FakeEngine
from srv.types import PooledHead, Pooling, RequestSpec

MODEL = "tiny"
CONTEXT = 256


@dataclass
class Serving:
    engine: FakeEngine
    client: EngineClient
    app: FastAPI
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The payloads of all events; the last is "[DONE]" if the stream ended without an error."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def events_of(text: str) -> list[Any]:
    payloads = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def settings(**changes: Any) -> ServerSettings:
    values: dict[str, Any] = {
        "model_name": MODEL,
        "context_length": CONTEXT,
        "max_request_tokens": CONTEXT,
        "vocab_size": ByteTokenizer.vocab_size,
        "hidden_size": HIDDEN,
        "pooling": Pooling.LAST,
        "return_hidden_states": True,
        "file_storage_path": Path("/nonexistent/srv"),
        "model_info": {"model_path": "/models/tiny"},
        "server_info": {"args": {"page_size": {"value": 16, "story": "because generic default"}}},
    }
    return ServerSettings(**(values | changes))


STORED_FILE = "file-" + "0" * 32
_STORAGE = tempfile.TemporaryDirectory()  # removed when the process ends


@cache
def file_storage() -> Path:
    """A folder in which an earlier server has stored a file for a batch."""
    folder = Path(_STORAGE.name)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    file = {"id": "", "owner": "", "filename": "a", "purpose": "batch", "created_at": 0, "bytes": 0}
    (folder / f"{STORED_FILE}.data").write_text(json.dumps(line))
    (folder / f"{STORED_FILE}.json").write_text(json.dumps(file))
    return folder


def settings_for(path: str) -> dict[str, Any]:
    """What a server needs to answer at `path`, beside the defaults: labels, to classify; a file, for a batch."""
    if path == "/v1/batches":
        return {"file_storage_path": file_storage()}
    return {"head": PooledHead(labels=("bad", "good"))} if path.endswith("/classify") else {}


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, text: ByteTokenizer | None = None, hooks: Hooks = NO_HOOKS, **changes: Any
) -> AsyncGenerator[Serving, None]:
    """The app without a socket."""
    engine = engine or FakeEngine()
    client = EngineClient(engine)
    running = asyncio.create_task(client.run())
    app = create_app(settings(**changes), client, text or ByteTokenizer(), hooks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Serving(engine, client, app, http)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def listening(
    engine: FakeEngine | None = None, limits: ConnectionLimits = DEFAULT_LIMITS, **changes: Any
) -> AsyncGenerator[Serving, None]:
    """The app behind real uvicorn, on a free loopback port."""
    async with serving(engine, **changes) as inner:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        service = inner.app.state.service
        protocol = http_protocol(service.metrics.responded, inner.app.state.refused, limits, service.settings.root_path)
        config = uvicorn.Config(inner.app, http=protocol, log_level="warning", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(10):
                while not server.started:
                    await asyncio.sleep(0.01)
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=base, timeout=20) as http:
                yield Serving(inner.engine, inner.client, inner.app, http)
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)
            listener.close()


async def eventually(check: Any, seconds: float = 5.0) -> None:
    """Wait until `check()` is true; TimeoutError if it does not become true."""
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


def generating(text: str | bytes, *after: int) -> FakeEngine:
    """An engine whose outputs are this text, and these tokens after it."""
    data = text.encode() if isinstance(text, str) else text
    return FakeEngine(script=lambda message: [*data, *after])


def prompt(server: Serving) -> str:
    """The text of the latest prompt that the engine got."""
    (*_, last) = [message for message in server.engine.received if isinstance(message, RequestSpec)]
    return bytes(last.tokens).decode()
