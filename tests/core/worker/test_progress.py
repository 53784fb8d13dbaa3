"""Progress of weight loading on a terminal that several ranks share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import StringIO

import pytest
import torch

from srv.dist.group import RankGroup
from srv.executor.spec import engine_spec
from srv.models.layers.context import BuildContext
from srv.planning.resolution import resolve_launch
from srv.platform.ops import Ops
from srv.testing.engine import user_input
from srv.worker import load
from srv.worker.progress import LoadProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_first_rank_draws_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank logs when it has loaded its part."""

    def build(*_: object, progress: Callable[[int, int, str], None], **__: object) -> None:
        progress(100, 50, "half")

    monkeypatch.setattr(load, "build", build)
    spec = engine_spec(resolve_launch(user_input(["--device", "cpu", "--tp-size", "3"])), "", "")
    drawn = {}
    for number in range(3):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        context = BuildContext(torch.device("cpu"), torch.bfloat16, Ops("cpu", ()), RankGroup(rank=number, size=3))
        with caplog.at_level(logging.INFO):
            load.load_model(spec, context, lambda layers: None)
        drawn[number] = "loading" in terminal.getvalue()
    assert drawn == {0: True, 1: False, 2: False}
    assert sum("loaded" in record.message for record in caplog.records) == 3


def test_a_log_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Without a terminal: 100 tensors in 25 seconds are two lines, and one at the end."""
    seconds = iter([0.0, *(number / 4 for number in range(1, 101)), 25.5])
    with caplog.at_level(logging.INFO), LoadProgress("tiny", bar=False, clock=lambda: next(seconds)) as progress:
        for number in range(1, 101):
            progress(100 << 20, number << 20, "a tensor")
    assert [record.getMessage() for record in caplog.records] == [
        "loading tiny: 40 of 100 MiB (4 MiB/s)",
        "loading tiny: 80 of 100 MiB (4 MiB/s)",
        "loaded tiny, 100.0 MiB of weights in 25.5 s",
    ]
