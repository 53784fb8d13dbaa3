"""Options of the whole suite: tiers and slices (tests/helpers/tiers.py), and how long tests take (times.py).

Triton's kernels run in Triton's interpreter, unless TRITON_INTERPRET=0 is set, on a machine with a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiers import LEFT, LeftRecorder, Slice, check_tiers
from times import Recorder, Stopwatch

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which other packages may do

settings.load_profile("ci")  # the same examples everywhere; others with --hypothesis-profile=default

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv-tiers", "tiers of tests, and how long they take")
    group.addoption("--times", metavar="FILE", help="write how long each test takes to FILE, as lines of JSON")
    group.addoption("--slice", metavar="N/COUNT", help="run a part of the proof; commit/COUNT takes N from HEAD's hash")
    group.addoption("--left", metavar="FILE", help="run the tests of the proof that are left in FILE")


def pytest_configure(config: pytest.Config) -> None:
    reports = not hasattr(config, "workerinput")  # a worker of xdist sends them to the process that started it
    if (path := config.getoption("--times")) is not None:
        config.pluginmanager.register(Stopwatch(), "srv-stopwatch")
        if reports:
            config.pluginmanager.register(Recorder(Path(path)), "srv-times")
    if reports and (path := config.getoption("--left")) is not None:
        recorder = LeftRecorder(Path(path), config.rootpath)
        config.pluginmanager.register(recorder, LEFT)


@pytest.hookimpl(trylast=True)  # after deselection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check_tiers(items)
    kept = {item.nodeid for item in items}
    if (text := config.getoption("--slice")) is not None:
        kept &= Slice.parse(text, config.rootpath).select(items)
    if (left := _left(config)) is not None:
        kept &= set(left)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


def _left(config: pytest.Config) -> list[str] | None:
    """The tests of the proof that were left when this run started; None if there is no such list."""
    if hasattr(config, "workerinput"):
        return config.workerinput.get(LEFT)
    recorder = config.pluginmanager.get_plugin(LEFT)
    return recorder.selected if recorder is not None else None


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens: a launch that is not refused earlier fails there, without an engine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]
