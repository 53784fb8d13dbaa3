"""Options of the whole suite: tiers and slices (tests/helpers/tiers.py), and how long tests take (times.py).

Triton's kernels run in Triton's interpreter, unless TRITON_INTERPRET=0 is set, on a machine with a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiers import COLLECTED, PASSED, PROOF, SLOW, TIERS, Progress, Slice, check_tiers, longest_first, says_mark
from times import Recorder, Stopwatch

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which other packages may do

settings.load_profile("ci")  # the same examples everywhere; others with --hypothesis-profile=default

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv-tiers", "tiers of tests, and how long they take")
    group.addoption("--times", metavar="FILE", help="write how long each test takes to FILE, as lines of JSON")
    group.addoption("--tier", choices=list(TIERS), help="run the tests of this tier only")
    group.addoption("--slice", metavar="N/COUNT", help="run a part of the proof; commit/COUNT takes N from HEAD's hash")
    group.addoption("--passed", metavar="FILE", help="run only tests that have not passed yet, by FILE, and update it")


def pytest_configure(config: pytest.Config) -> None:
    if (tier := config.getoption("--tier")) is not None:
        config.option.markexpr = TIERS[tier]
    reports = not hasattr(config, "workerinput")  # a worker of xdist sends them to the process that started it
    if (path := config.getoption("--times")) is not None:
        config.pluginmanager.register(Stopwatch(), "srv-stopwatch")
        if reports:
            config.pluginmanager.register(Recorder(Path(path)), "srv-times")
    if reports and (path := config.getoption("--passed")) is not None:
        config.pluginmanager.register(Progress(Path(path), config.rootpath), PASSED)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tier = config.getoption("--tier")
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and tier in (SLOW, PROOF) and not says_mark(collection_path, tier) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """With --dist loadgroup, a file that has a group runs in one process, and all other tests one by one."""
    if config.getoption("dist") != "loadgroup":
        return None
    from process_groups import scheduling  # it needs xdist

    return scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    check_tiers(items)
    yield  # in which pytest deselects by marks
    kept = {item.nodeid for item in items}
    if (text := config.getoption("--slice")) is not None:
        kept &= Slice.parse(text, config.rootpath).select(items)
    kept -= _passed(config, kept)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    if config.getoption("--tier") == PROOF:
        longest_first(items)


def _passed(config: pytest.Config, collected: set[str]) -> set[str]:
    """The tests that had passed when this run started."""
    if hasattr(config, "workerinput"):
        config.workeroutput[COLLECTED] = sorted(collected)
        return set(config.workerinput.get(PASSED, ()))
    progress = config.pluginmanager.get_plugin(PASSED)
    if progress is None:
        return set()
    progress.collected(collected)
    return set(progress.passed_before)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens: a launch that is not refused earlier fails there, without an engine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]
