"""Files and lines of batches, for tests of a server in this event loop."""

from __future__ import annotations

import json
from typing import Any

from server_support import Serving

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
FORM = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": custom_id, "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


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
