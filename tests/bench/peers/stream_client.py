"""The load client: concurrent streamed HTTP requests to one server. It is the same for every server.

Owns the HTTP requests and the clock. Must not know which server answers: all implement OpenAI's `/v1/completions` with
token ids as the prompt. It runs on the cores that it measures, so it does little while answers arrive: it stores the
bytes and two times, and reads the token count from the last chunk afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from bench_loads import Prompts, Workload

FIRST = b"data: {"
LAST = b"[DONE]"
COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
HOST = "127.0.0.1"
REQUEST_S = 300.0
GREEDY: Mapping[str, object] = MappingProxyType({"temperature": 0})


class Answer(NamedTuple):
    """Seconds to the first and the last streamed chunk of a request, and its tokens as counted by the server."""

    first_s: float
    last_s: float
    tokens: int


class Load(NamedTuple):
    """Seconds until every request of a load was answered, and the seconds to the first token of each."""

    seconds: float
    firsts: list[float]


def body(
    ids: Sequence[int], output: int, model: str | None, sampling: Mapping[str, object] = GREEDY
) -> dict[str, object]:
    """A request for exactly `output` tokens after the prompt `ids`. `sampling`: the sampling parameters."""
    fields: dict[str, object] = {
        "prompt": list(ids),
        "max_tokens": output,
        **sampling,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return fields | ({"model": model} if model else {})


def http_request(port: int, path: str, fields: dict[str, object]) -> bytes:
    content = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content


class _Exchange(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._started = 0.0
        self._first = 0.0
        self._transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._started = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        if not self._first and FIRST in self._received:
            self._first = now
        if LAST in self._received[-64:] and not self.answer.done():
            self._close(now)

    def _close(self, now: float) -> None:
        counts = COUNT.findall(self._received)
        if counts and self._first:
            self.answer.set_result(Answer(self._first - self._started, now - self._started, int(counts[-1])))
        else:
            self.answer.set_exception(RuntimeError(f"an answer without a token count: {self._end()}"))
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(RuntimeError(f"the stream broke off ({error}): {self._end()}"))

    def _end(self) -> str:
        return self._received[-400:].decode(errors="replace")


async def ask(
    port: int, ids: Sequence[int], output: int, model: str | None = None, sampling: Mapping[str, object] = GREEDY
) -> Answer:
    """Send one streamed request. Raises RuntimeError if the stream is incomplete or has another length."""
    request = http_request(port, "/v1/completions", body(ids, output, model, sampling))
    _, exchange = await asyncio.get_running_loop().create_connection(lambda: _Exchange(request), HOST, port)
    answer = await asyncio.wait_for(exchange.answer, REQUEST_S)
    if answer.tokens != output:
        raise RuntimeError(f"{output} tokens were asked for, {answer.tokens} came")
    return answer


async def _load(
    port: int, workload: Workload, prompts: Prompts, model: str | None, sampling: Mapping[str, object] = GREEDY
) -> Load:
    if workload.shared:
        await ask(port, prompts.prefix(workload), 1, model)
    drawn = prompts.draw(workload)
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, ids, workload.output, model, sampling) for ids in drawn))
    return Load(time.perf_counter() - started, [answer.first_s for answer in answers])


def run_load(
    port: int,
    workload: Workload,
    prompts: Prompts,
    model: str | None = None,
    sampling: Mapping[str, object] = GREEDY,
) -> Load:
    """Send all requests of a workload concurrently, after the shared prefix, if any, has been cached by a request."""
    return asyncio.run(_load(port, workload, prompts, model, sampling))
