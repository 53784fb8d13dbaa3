"""Ways of choosing tokens take turns at each load, and are compared with the greedy one; the client answers at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import sampled
from bench_loads import Point, Prompts
from stream_client import Load

POINT = Point("two", 2, 8, 10)


def test_ways_take_turns_and_are_compared_with_the_greedy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, object]] = []

    def answer(port: int, point: Point, prompts: Prompts, sampling: Mapping[str, object]) -> Load:
        sent.append(sampling)
        return Load(8.0 if "top_p" in sampling else 4.0, [0.1])

    monkeypatch.setattr(sampled, "run_load", answer)
    found = sampled.measure(1, [POINT], 2, Prompts(1000, 1))
    ways = list(sampled.WAYS.values())
    assert sent == [*ways, *ways, *reversed(ways)], "warmed up, forwards, backwards"
    assert found["two"]["greedy"] == {"tokens_s": 5.0, "ratio": 1.0, "rounds_s": [4.0, 4.0]}
    assert found["two"]["temperature 1, top_p 0.95"]["ratio"] == 0.5


def test_the_table_has_a_row_for_each_load_and_way(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"two": {way: {"tokens_s": 5.0, "ratio": 0.5, "rounds_s": [4.0]} for way in sampled.WAYS}}
    sampled.show(figures)
    shown = capsys.readouterr().out
    assert all(way in shown for way in sampled.WAYS)
    assert shown.count("0.50") == len(sampled.WAYS)
