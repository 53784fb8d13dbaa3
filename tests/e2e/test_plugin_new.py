"""What `srv plugin new` makes, unedited: it builds, installs, is found by the doctor, serves, and conforms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_support import greedy, served, srv_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME = "acme"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the new package, installed beside everything else; no network is asked."""
    folder = tmp_path_factory.mktemp("new")
    made = subprocess.run(
        srv_command("plugin", "new", NAME, "--into", str(folder)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(target), str(folder / f"srv-{NAME}")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(autouse=True)
def _visible(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*words: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(srv_command(*words), capture_output=True, text=True, timeout=seconds, check=False)


def test_the_doctor_says_that_a_server_can_start_on_it() -> None:
    done = run("doctor", "--device", NAME, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (platform,) = json.loads(done.stdout)["platforms"]
    assert (platform["distribution"], platform["simulated"], platform["usable"]) == ("srv-acme", True, True)
    assert {each["status"] for each in platform["findings"]} == {"ok"}


def test_it_serves_an_answer(tmp_path: Path) -> None:
    arguments = ("--device", NAME, "--dtype", "float32", "--max-total-tokens", "1024")
    with served(tmp_path / "log", *arguments) as server:
        assert server.get("/get_server_info").json()["platform"] == NAME
        assert len(server.generate(**greedy("The capital of France is", 6))["output_ids"]) == 6


def test_it_passes_its_own_tests(installed: Path) -> None:
    folder = installed.parent / f"srv-{NAME}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(1500)
def test_it_conforms_to_level_3(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    done = run("conformance", "run", "--device", NAME, "--level", "L3", "--report", str(report), seconds=1400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert [row for row in rows if row["kind"] == "outcome" and row["status"] == "failed"] == []
    assert {row["level"] for row in rows if row["kind"] == "outcome" and row["status"] == "passed"} == {
        "L0",
        "L1",
        "L2",
        "L3",
    }
