"""Files and lines of batches, for tests of a server in this event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from server_support import Serving

from srv.server.batches.files import FileStore
from srv.server.batches.runner import ENDED
from srv.testing.fake_engine import FakeEngine

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
LONG = {"prompt": "x", "max_tokens": 200}  # a line that runs for seconds at `long_and_short`
FORM = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": custom_id, "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in lines)


def form(**fields: bytes) -> dict[str, Any]:
    """The arguments of a POST of a form; `file` is a file."""
    parts = [
        FORM % (name.encode(), b'; filename="a.jsonl"' if name == "file" else b"", data)
        for name, data in fields.items()
    ]
    return {"content": b"".join(parts) + b"--x--\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}


async def upload(server: Serving, data: bytes, key: str = "") -> str:
    sent = form(purpose=b"batch", file=data)
    headers = sent.pop("headers") | ({"x-api-key": key} if key else {})
    response = await server.http.post("/v1/files", headers=headers, **sent)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def start(server: Serving, *lines: object, endpoint: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    return await begin(server, await upload(server, jsonl(*lines)), endpoint, **more)


async def begin(server: Serving, file: str, endpoint: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    """A batch of a file that was uploaded."""
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **more}
    response = await server.post("/v1/batches", **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def ended(server: Serving, batch: dict[str, Any], seconds: float = 20) -> dict[str, Any]:
    async with asyncio.timeout(seconds):
        while True:
            shown = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
            if shown["status"] in ENDED:
                return dict(shown)
            await asyncio.sleep(0.01)


async def results(server: Serving, file: str | None) -> dict[str, Any]:
    """The entries of a file with results, by custom_id."""
    text = (await server.http.get(f"/v1/files/{file}/content")).text
    return {entry["custom_id"]: entry for entry in map(json.loads, text.splitlines())}


def long_and_short() -> FakeEngine:
    """An engine for which lines with the prompt "short" end at once, and others go on until they are aborted."""
    script = lambda spec: b"ab" if bytes(spec.tokens) == b"short" else [97] * 10**6  # noqa: E731
    return FakeEngine(script=script, step_seconds=0.02)


async def counted(server: Serving, batch: dict[str, Any], **counts: int) -> None:
    """Wait until a batch has these counts."""
    async with asyncio.timeout(20):
        while True:
            shown = (await server.http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
            if all(shown[name] == count for name, count in counts.items()):
                return
            await asyncio.sleep(0.01)


def used(store: FileStore) -> int:
    """The bytes that a store counts."""
    store.load()
    return store._used
