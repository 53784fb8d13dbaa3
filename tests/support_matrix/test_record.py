"""`srv matrix record`: which tests it runs where and in which order, and that it goes on where it stopped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from matrix_world import evidence, git

from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_matrix.ages import Age
from srv_matrix.evidence import read_folder
from srv_matrix.places import Place, selected
from srv_matrix.record import Recording, due
from srv_matrix.repository import MatrixError, Repository

MARK = {"covers": ["host"], "platform": "imagined", "level": "E4", "note": "", "variant": ""}
ANYWHERE = {**MARK, "platform": ""}
HERE = Place("imagined", "mk1", ("tests/",), never=("too_long",))

TESTS = """
import pathlib, time
import pytest
from srv_matrix.pytest_plugin import covers

@covers("host", platform="cpu")
def test_short():
    assert True

@covers("port", platform="cpu")
def test_skipped():
    pytest.skip("not here")

@covers("device", platform="cpu")
def test_long():
    if not pathlib.Path(".git/short").exists():
        time.sleep(250)
"""


def test_the_oldest_evidence_is_due_first() -> None:
    tests = ("tests/a.py::old", "tests/a.py::new", "tests/b.py::none", "tests/c.py::current", "tests/d.py::older")
    commits = {"old": "c2", "new": "c1", "current": "c0", "older": "c3"}
    marks = {
        **dict.fromkeys(tests, MARK),
        "tests/e.py::too_long": MARK,
        "tests/e.py::of_another": {**MARK, "platform": "toy"},
        "elsewhere/f.py::test": ANYWHERE,
    }
    lines = [evidence("host", test=test, commit=commits[name]) for test in tests if (name := test[12:]) in commits]
    ages = {("imagined", f"c{number}"): Age(number, 10 * number) for number in range(4)}
    slices = [(part.rank, part.tests) for part in due(HERE, marks, lines, ages)]
    assert slices == [
        ((0, 0, 0), ("tests/b.py::none",)),
        ((1, -3, -30), ("tests/d.py::older",)),
        ((1, -2, -20), ("tests/a.py::old", "tests/a.py::new")),
    ]
    tried = [test for _, tests in slices[1:] for test in tests]
    assert [part.tests for part in due(HERE, marks, lines, ages, tried)] == [("tests/b.py::none",)]
    elsewhere = Place("imagined", "mk2", ("tests/", "elsewhere/"), only="test")
    assert [(part.rank, part.tests) for part in due(elsewhere, marks, lines, ages)] == [
        ((2, 0, 0), ("elsewhere/f.py::test",))
    ]


def test_a_place_that_is_not_here_is_refused() -> None:
    other = Place("imagined", "mk2", ())
    assert selected([HERE, other], "") == selected([HERE, other], "imagined") == [HERE, other]
    assert selected([HERE, other], "imagined:mk2") == [other]
    with pytest.raises(MatrixError, match=r"--platform imagined:mk3: .* It has imagined:mk1, imagined:mk2"):
        selected([HERE, other], "imagined:mk3")


@pytest.fixture
def checkout(tmp_path: Path) -> Repository:
    for name, text in (
        ("support_matrix/published/index.toml", ""),
        ("support_matrix/evidence/README.md", ""),
        ("tests/test_cells.py", TESTS),
        ("pytest.ini", "[pytest]\naddopts = -p srv_matrix.pytest_plugin -p no:cacheprovider\n"),
        (".gitignore", "__pycache__\nbuild\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return Repository(tmp_path)


@pytest.mark.proof(minutes=1.1)
def test_recording_that_is_ended_goes_on(checkout: Repository, capfd: pytest.CaptureFixture[str]) -> None:
    device = probe(find_platforms()["cpu"]).device
    assert device is not None
    place = Place("cpu", device.variant, ("tests/",))

    def recorded() -> set[str]:
        return {line.test.partition("::")[2] for line in read_folder(checkout.evidence) if line.passed}

    first = Recording(checkout, [place], time.monotonic() + 200)

    def end() -> None:
        while not recorded() and time.monotonic() < first.end:
            time.sleep(0.1)
        first.end = 0.0

    watching = threading.Thread(target=end)
    watching.start()
    assert first.run()
    watching.join()
    assert recorded() == {"test_short"}
    assert f"cpu:{device.variant}: 2 tests are due\nRun it again to go on." in capfd.readouterr().out

    (checkout.root / ".git" / "short").touch()
    second = Recording(checkout, [place], time.monotonic() + 200)
    assert second.run()
    assert recorded() == {"test_short", "test_long"}
    assert "tests/test_cells.py: 1 of 2 recorded" in capfd.readouterr().out  # the other is skipped

    third = Recording(checkout, [place], time.monotonic() + 200)
    assert third.run()
    assert capfd.readouterr().out.startswith(f"cpu:{device.variant}: nothing is due\n")

    (checkout.root / "tests" / "test_cells.py").write_text(TESTS + "\n")
    with pytest.raises(MatrixError, match=r"Commit first: tests/test_cells\.py"):
        third.run()
