"""Progress of weight loading on a terminal that several ranks share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from srv.dist.group import RankGroup
from srv.executor.spec import engine_spec
from srv.planning.resolution import resolve_launch
from srv.testing.engine import user_input
from srv.worker import rank
from srv.worker.rank import RankWorker


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_first_rank_draws_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank logs when it has loaded its part."""

    def build(*_: object, progress: Callable[[int, int, str], None], **__: object) -> None:
        progress(100, 50, "half")

    monkeypatch.setattr(rank, "build_model", build)
    spec = engine_spec(resolve_launch(user_input(["--device", "cpu", "--tp-size", "3"])), "", "")
    drawn = {}
    for number in range(3):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        worker = RankWorker(spec, RankGroup(rank=number, size=3))
        worker.platform = cast("Any", SimpleNamespace(ops={}))
        worker.device = torch.device("cpu")
        with caplog.at_level(logging.INFO):
            worker._load_model()
        drawn[number] = "loading" in terminal.getvalue()
    assert drawn == {0: True, 1: False, 2: False}
    assert sum("loaded" in record.message for record in caplog.records) == 3
