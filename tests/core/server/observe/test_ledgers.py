"""Both ledgers in `/get_server_info` and in `/metrics`."""

from __future__ import annotations

import pytest
from server_support import serving

from srv.io.memory_lines import MemoryLine
from srv.io.messages import Control
from srv.io.phases import Phase
from srv.testing.fake_engine import PEAK_BYTES

pytestmark = pytest.mark.anyio

RANKS = [
    [MemoryLine("weights", 1000, 1010), MemoryLine("activations", 4000, None, "not yet")],
    [MemoryLine("weights", 1000, 1000), MemoryLine("activations", 4000, None, "not yet")],
]
PROCESSES = {"api": [Phase("tokenizer", 0.5)], "engine": [Phase("weights", 2.5, 1.0, "a sample", "the disk was slow")]}


async def test_server_info_has_the_lines_of_each_rank_with_the_peak_of_steps() -> None:
    async with serving(memory=RANKS, counts_peak=True, startup=lambda: PROCESSES) as server:
        info = (await server.http.get("/get_server_info")).json()
    first, second = info["memory"]
    assert (first["process"], second["process"]) == ("rank 0", "rank 1")
    assert first["lines"][0] == {
        "name": "weights",
        "predicted": 1000,
        "measured": 1010,
        "note": "",
        "excess": 0.01,
    }
    assert first["lines"][1]["measured"] == PEAK_BYTES
    assert second["lines"][1] == {
        "name": "activations",
        "predicted": 4000,
        "measured": None,
        "note": "not yet",
        "excess": None,
    }
    assert [startup["process"] for startup in info["startup"]] == ["api", "engine"]
    (phase,) = info["startup"][1]["phases"]
    assert (phase["name"], phase["seconds"], phase["predicted"], phase["cause"]) == (
        "weights",
        2.5,
        1.0,
        "the disk was slow",
    )


async def test_server_info_of_an_engine_that_is_gone_has_no_peak() -> None:
    async with serving(memory=RANKS, counts_peak=True, startup=lambda: PROCESSES) as server:
        server.engine.die()
        info = (await server.http.get("/get_server_info")).json()
    assert [rank["lines"][1]["measured"] for rank in info["memory"]] == [None, None]


async def test_metrics_have_both_figures_of_a_line_and_the_seconds_of_a_phase() -> None:
    async with serving(memory=RANKS, startup=lambda: PROCESSES) as server:
        text = (await server.http.get("/metrics")).text
    assert 'srv_memory_ledger_bytes{figure="predicted",line="weights",rank="0"} 1000.0' in text
    assert 'srv_memory_ledger_bytes{figure="measured",line="weights",rank="0"} 1010.0' in text
    assert 'srv_memory_ledger_bytes{figure="measured",line="activations"' not in text
    assert 'srv_start_seconds{phase="weights",process="engine"} 2.5' in text


async def test_an_engine_without_a_peak_is_not_asked_for_it() -> None:
    """The engine answers between steps, so that asking costs the overlap of one."""
    async with serving(memory=RANKS) as server:
        info = (await server.http.get("/get_server_info")).json()
        assert not any(isinstance(message, Control) for message in server.engine.received)
    assert [rank["lines"][1]["measured"] for rank in info["memory"]] == [None, None]
