"""An engine that hangs: what the server reports and does, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from server_support import Serving, eventually, serving

from srv.server import watchdog
from srv.server.watchdog import Watchdog, WatchdogLimits

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watched(limits: WatchdogLimits) -> AsyncGenerator[tuple[Serving, list[str]], None]:
    calls: list[str] = []
    async with serving() as server:
        watching = Watchdog(
            server.client,
            server.app.state.lifecycle,
            limits,
            lambda: calls.append("dumped"),
            lambda: calls.append("ended"),
        )
        running = asyncio.create_task(watching.run())
        try:
            yield server, calls
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_silent_engine_makes_the_server_unhealthy_until_it_goes_on() -> None:
    async with watched(WatchdogLimits(soft=0.2, hard=60)) as (server, calls):
        assert (await server.http.get("/health")).status_code == 200
        await eventually(lambda: server.app.state.lifecycle.hung)
        response = await server.http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "engine hung"})
        assert calls == ["dumped"]
        await server.client.stats()  # the engine answers
        await eventually(lambda: not server.app.state.lifecycle.hung)
        assert (await server.http.get("/health")).status_code == 200


async def test_an_engine_that_stays_silent_is_ended() -> None:
    async with watched(WatchdogLimits(soft=0.1, hard=0.3)) as (_, calls):
        await eventually(lambda: "ended" in calls)
        assert calls == ["dumped", "ended"]


async def test_stacks_are_logged_before_the_end_if_both_limits_are_reached_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "DUMP_SECONDS", 0.1)
    async with watched(WatchdogLimits(soft=0.2, hard=0.2)) as (_, calls):
        await eventually(lambda: "dumped" in calls)
        assert calls == ["dumped"]
        await eventually(lambda: "ended" in calls)
        assert calls == ["dumped", "ended"]


async def test_an_engine_that_answers_is_left_alone() -> None:
    async with watched(WatchdogLimits(soft=1.0, hard=1.5)) as (server, calls):
        for _ in range(40):
            await server.client.stats()
            await asyncio.sleep(0.05)
        assert not calls
