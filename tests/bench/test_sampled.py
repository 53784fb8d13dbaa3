"""Each load runs with all sampling parameters in turn, and is compared with greedy; the client is a fake."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import sampled
from bench_loads import Prompts, Workload
from stream_client import Load

WORKLOAD = Workload("two", 2, 8, 10)


def test_samplings_take_turns_and_are_compared_with_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, object]] = []

    def answer(port: int, workload: Workload, prompts: Prompts, sampling: Mapping[str, object]) -> Load:
        sent.append(sampling)
        return Load(8.0 if "top_p" in sampling else 4.0, [0.1])

    monkeypatch.setattr(sampled, "run_load", answer)
    figures = sampled.measure(1, [WORKLOAD], 2, Prompts(1000, 1))
    samplings = list(sampled.SAMPLINGS.values())
    assert sent == [*samplings, *samplings, *reversed(samplings)], "warmed up, forwards, backwards"
    assert figures["two"]["greedy"] == {"tokens_s": 5.0, "ratio": 1.0, "rounds_s": [4.0, 4.0]}
    assert figures["two"]["temperature 1, top_p 0.95"]["ratio"] == 0.5


def test_the_table_has_a_row_for_each_load_and_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"two": {name: {"tokens_s": 5.0, "ratio": 0.5, "rounds_s": [4.0]} for name in sampled.SAMPLINGS}}
    sampled.show(figures)
    shown = capsys.readouterr().out
    assert all(name in shown for name in sampled.SAMPLINGS)
    assert shown.count("0.50") == len(sampled.SAMPLINGS)
