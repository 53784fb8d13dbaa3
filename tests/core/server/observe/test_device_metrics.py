"""The devices' sensors at /metrics: their gauges, and sensors that fail, hang or are missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from server_support import serving

from srv.platform.sensors import Reading, Readings
from srv.server.observe.device_reader import DeviceReader
from srv.server.observe.metrics import Metrics

pytestmark = pytest.mark.anyio
GIB = 1 << 30
BUSY = Reading("0", "Example 100", 0.75, 61.0, 412.5, 20 * GIB, 80 * GIB, {"power_cap": True, "thermal": False})
SILENT = Reading("1", "Example 10")


async def test_a_scrape_reads_the_sensors_anew() -> None:
    answers = iter((Readings((BUSY, SILENT)), Readings((SILENT,))))
    async with serving(sensors=lambda: next(answers)) as server:
        first = (await server.http.get("/metrics")).text
        second = (await server.http.get("/metrics")).text
    lines = {line for line in first.splitlines() if line.startswith("srv_device_")}
    one = 'device="0",name="Example 100"'
    assert lines == {
        f"srv_device_utilization_ratio{{{one}}} 0.75",
        f"srv_device_temperature_celsius{{{one}}} 61.0",
        f"srv_device_power_watts{{{one}}} 412.5",
        f"srv_device_memory_used_bytes{{{one}}} 2.147483648e+10",
        f"srv_device_memory_total_bytes{{{one}}} 8.589934592e+10",
        f'srv_device_throttled{{{one},reason="power_cap"}} 1.0',
        f'srv_device_throttled{{{one},reason="thermal"}} 0.0',
    }
    assert "srv_device_" not in second


async def test_sensors_that_hang_cost_a_scrape_its_gauges_only_and_no_second_thread() -> None:
    calls, called, release = [], threading.Event(), threading.Event()

    def read() -> Readings:
        calls.append(threading.current_thread())
        called.set()
        release.wait(60)
        return Readings((BUSY,))

    reader = DeviceReader(read, seconds=0.01)
    assert await reader.devices() == ()
    assert called.wait(60)
    assert await reader.devices() == ()
    assert len(calls) == 1
    assert calls[0].daemon
    release.set()
    calls[0].join(60)
    reader = DeviceReader(read, seconds=60)
    assert await reader.devices() == (BUSY,)
    assert calls[1] is not threading.current_thread()


def _raise() -> Readings:
    raise OSError("the driver is gone")


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (_raise, "OSError: the driver is gone"),
        (lambda: Readings(missing="no library", remedy="Install it."), "no library"),
    ],
    ids=["raises", "missing"],
)
async def test_missing_sensors_are_logged_once(
    read: Callable[[], Readings], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = DeviceReader(read)
    with caplog.at_level(logging.WARNING, "srv.server.observe.device_reader"):
        assert [await reader.devices() for _ in range(2)] == [(), ()]
    (record,) = caplog.records
    assert words in record.getMessage()


async def test_a_platform_without_sensors_starts_no_thread() -> None:
    assert await DeviceReader(None).devices() == ()
    assert b"srv_device_" not in Metrics("m").expose(None, False)


def test_a_reading_is_a_line_of_the_doctor() -> None:
    assert str(BUSY) == "Example 100 (0): 75 % busy, 61 °C, 412 W, 20.0 of 80.0 GiB used, clock lowered by power_cap"
    assert str(SILENT) == "Example 10 (1): reports nothing"
