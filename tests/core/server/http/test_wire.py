"""The app behind uvicorn on a loopback port: disconnects, body limits, the openai client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import openai
import pytest
from server_support import MODEL, Serving, eventually, listening

from srv.io.messages import Abort
from srv.server.http.access import Access
from srv.testing.fake_engine import EOS, FakeEngine

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]


def aborted(server: Serving) -> int:
    return sum(len(m.requests or ()) for m in server.engine.received if isinstance(m, Abort))


def idle(server: Serving) -> bool:
    """Nothing runs or waits, and no response is open. A response ends when its client has read it completely."""
    return not server.engine.running and server.app.state.lifecycle.active == 0 and server.client.waiting == 0


async def test_a_disconnect_during_a_stream_aborts_its_requests() -> None:
    async with listening(FakeEngine(step_seconds=0.005)) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 250, "stream": True, "n": 2}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await eventually(lambda: idle(server))
        assert aborted(server) == 4
        assert (await server.post("/v1/completions", prompt="a")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": ["a", "b"]}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
async def test_a_disconnect_before_the_response_aborts_too(path: str, body: dict[str, object]) -> None:
    async with listening(FakeEngine(hold=True)) as server:
        client = asyncio.create_task(server.http.post(path, json=body))
        await eventually(lambda: server.engine.running)
        client.cancel()
        await eventually(lambda: aborted(server) and idle(server))


async def chunks(count: int, size: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield b"x" * size


async def test_a_body_over_the_limit_is_refused_with_and_without_a_declared_length() -> None:
    async with listening(max_request_bytes=100_000, max_prompt_bytes=100_000) as server:
        for content in (b"x" * 100_001, b"x" * 5_000_000, chunks(30, 50_000)):
            response = await server.http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        fits = await server.post("/tokenize", prompt="x" * 50_000)
        assert fits.status_code == 200


async def test_a_large_declared_body_is_refused_before_it_arrives() -> None:
    async with listening(max_request_bytes=1000) as server:
        port = server.http.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 2000)
        assert b"413" in await asyncio.wait_for(reader.readline(), 50)
        writer.close()


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async with listening(body_seconds=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_invalid_utf8_over_the_wire() -> None:
    async with listening() as server:
        response = await server.http.post("/v1/completions", content=b'{"prompt": "\xff"}')
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_utf8")


async def test_the_openai_client_chats_streams_and_reads_errors() -> None:
    engine = FakeEngine(script=lambda message: [*b"Hello there", EOS])
    async with listening(engine, access=Access(key="k")) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="k", max_retries=0)
        async with client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            response = await client.chat.completions.create(
                model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1, n=2, user="u"
            )
            assert [choice.message.content for choice in response.choices] == ["Hello there"] * 2
            assert response.choices[0].finish_reason == "stop"
            assert response.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
            assert response.usage.completion_tokens == 24
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, stop=["there"], stream_options={"include_usage": True}
            )
            parts = [chunk async for chunk in stream]
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == "Hello "
            assert parts[-1].usage.completion_tokens == 6
            completion = await client.completions.create(
                model=MODEL, prompt=["a", "b"], max_tokens=5, echo=True, logprobs=0
            )
            assert [choice.text for choice in completion.choices] == ["aHello", "bHello"]
            with pytest.raises(openai.BadRequestError, match="tools is refused"):
                await client.chat.completions.create(
                    model=MODEL, messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}]
                )
            with pytest.raises(openai.NotFoundError, match="tiny"):
                await client.chat.completions.create(model="gpt-9", messages=HELLO)
            engine.request_error = ("not_finite", "the logits are not finite")
            with pytest.raises(openai.APIError, match="not finite"):
                async for _ in await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
                    pass
        stranger = openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="other", max_retries=0)
        async with stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_sixty_four_streams_with_disconnects_leave_no_request_behind() -> None:
    async with listening(FakeEngine(step_seconds=0.001)) as server:

        async def one(index: int) -> int:
            body = {"prompt": "a", "max_tokens": 40, "stream": True}
            lines = 0
            async with server.http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    lines += bool(line)
                    if index % 3 == 0 and lines == index % 30 + 1:
                        break
            return lines

        results = await asyncio.gather(*(one(index) for index in range(64)))
        assert [lines for index, lines in enumerate(results) if index % 3] == [41] * 42
        await eventually(lambda: idle(server))
        assert (await server.http.get("/health")).status_code == 200
