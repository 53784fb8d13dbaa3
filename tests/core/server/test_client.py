"""The engine client: routing of outputs, early ends, a dead engine, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest
from server_support import eventually

from srv.errors import EngineDead, RequestError
from srv.io.messages import Abort, Finish, LoadFailed, Output
from srv.server.client import EngineClient
from srv.testing.fake_engine import FakeEngine
from srv.types import FinishReason, RequestSpec, SamplingParams

pytestmark = pytest.mark.anyio


def request(name: str, tokens: int = 3) -> RequestSpec:
    return RequestSpec(id=name, tokens=(1, 2), params=SamplingParams(max_tokens=tokens))


@asynccontextmanager
async def connected(engine: FakeEngine) -> AsyncGenerator[EngineClient, None]:
    client = EngineClient(engine)
    task = asyncio.create_task(client.run())
    yield client
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def collect(client: EngineClient, message: RequestSpec) -> list[Output]:
    return [output async for output in client.generate(message)]


async def test_concurrent_requests_get_their_own_outputs() -> None:
    engine = FakeEngine(script=lambda message: [int(message.id)] * 5)
    async with connected(engine) as client:
        results = await asyncio.gather(*(collect(client, request(str(index), 4)) for index in range(8)))
        for index, outputs in enumerate(results):
            assert [token for output in outputs for token in output.tokens] == [index] * 4
            assert outputs[-1].finish is FinishReason.LENGTH
        assert client.waiting == 0


async def test_closing_the_iterator_early_aborts_once() -> None:
    engine = FakeEngine()
    async with connected(engine) as client:
        async with aclosing(client.generate(request("a", 1000))) as outputs:
            await anext(outputs)
        await eventually(lambda: not engine.running)
        assert [m for m in engine.received if not isinstance(m, RequestSpec)] == [Abort(["a"])]
        assert client.waiting == 0


async def test_cancelling_the_reader_aborts() -> None:
    engine = FakeEngine(hold=True)
    async with connected(engine) as client:
        task = asyncio.create_task(collect(client, request("a")))
        await eventually(lambda: engine.running)
        task.cancel()
        await eventually(lambda: not engine.running)
        assert engine.received[-1] == Abort(["a"])


async def test_finish_ends_a_request_without_an_abort() -> None:
    engine = FakeEngine()
    async with connected(engine) as client:
        async with aclosing(client.generate(request("a", 1000))) as outputs:
            await anext(outputs)
            client.finish("a")
        await eventually(lambda: not engine.running)
        assert [m for m in engine.received if not isinstance(m, RequestSpec)] == [Finish("a")]


async def test_abort_all_gives_every_reader_a_last_output() -> None:
    engine = FakeEngine(hold=True)
    async with connected(engine) as client:
        tasks = [asyncio.create_task(collect(client, request(name))) for name in "ab"]
        await eventually(lambda: len(engine.running) == 2)
        client.abort(None)
        for outputs in await asyncio.gather(*tasks):
            assert [output.finish for output in outputs] == [FinishReason.ABORT]


async def test_an_id_in_use_is_refused() -> None:
    engine = FakeEngine(hold=True)
    async with connected(engine) as client:
        task = asyncio.create_task(collect(client, request("a")))
        await eventually(lambda: engine.running)
        with pytest.raises(RequestError, match="in use"):
            await collect(client, request("a"))
        client.abort(["a"])
        assert len(await task) == 1


async def test_a_dead_engine_fails_waiting_and_later_requests_and_calls() -> None:
    engine = FakeEngine(hold=True)
    async with connected(engine) as client:
        tasks = [asyncio.create_task(collect(client, request(name))) for name in "ab"]
        await eventually(lambda: len(engine.running) == 2)
        engine.die("killed by signal 9")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert "signal 9" in str(result)
        assert not client.alive
        for later in (collect(client, request("c")), client.stats(), client.flush()):
            with pytest.raises(EngineDead):
                await later
        assert await client.drain(1) is None


async def test_outputs_before_a_failure_are_still_read() -> None:
    engine = FakeEngine()
    async with connected(engine) as client, aclosing(client.generate(request("a", 1000))) as outputs:
        first = await anext(outputs)
        assert first.tokens
        client.fail(EngineDead("gone"))
        with pytest.raises(EngineDead, match="gone"):
            async for _ in outputs:
                pass


async def test_a_failed_load_fails_the_client_with_its_reason() -> None:
    engine = FakeEngine()
    async with connected(engine) as client:
        engine._outbox.put_nowait(LoadFailed(["no such model"], 2))
        await eventually(lambda: not client.alive)
        with pytest.raises(EngineDead, match="no such model"):
            client.check_alive()


async def test_flush_and_stats_return_to_their_callers() -> None:
    engine = FakeEngine(hold=True)
    async with connected(engine) as client:
        assert (await client.flush()).done
        task = asyncio.create_task(collect(client, request("a")))
        await eventually(lambda: engine.running)
        first, second, flushed = await asyncio.gather(client.stats(), client.stats(), client.flush())
        assert first.waiting == second.waiting == 1
        assert first.call != second.call
        assert not flushed.done
        assert client.latest_stats is not None
        client.abort(["a"])
        await task


async def test_drain_waits_for_running_requests() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with connected(engine) as client:
        task = asyncio.create_task(collect(client, request("a", 3)))
        await eventually(lambda: engine.running)
        drained = await client.drain(0.5)
        assert drained is not None
        assert (await task)[-1].finish is FinishReason.LENGTH
        with pytest.raises(EngineDead, match="shut down"):
            client.check_alive()
