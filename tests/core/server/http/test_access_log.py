"""One line per response, at the level that its status asks for."""

from __future__ import annotations

import logging
import re

import httpx
import pytest
from every import every
from starlette.types import Receive, Scope, Send

from srv.server.http.access_log import AccessLog

pytestmark = pytest.mark.anyio


@every(("status", "level"), [(200, "INFO"), (499, "INFO"), (500, "WARNING"), (503, "WARNING")])
async def test_faults_of_the_server_are_warnings(status: int, level: str, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"12", "more_body": True})
        await send({"type": "http.response.body", "body": b"345"})

    caplog.clear()
    with caplog.at_level(logging.INFO, "srv.access"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(AccessLog(app)), base_url="http://here") as client:
            await client.get("/a%0Ab?key=secret")
    (record,) = caplog.records
    assert record.levelname == level
    assert re.fullmatch(rf'127\.0\.0\.1 "GET /a\\nb" {status} 5 B \d\.\d{{3}} s', record.getMessage())
