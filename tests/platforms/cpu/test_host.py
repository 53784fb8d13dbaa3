"""How many threads a worker computes on, and who decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from every import every

from srv_cpu import host
from srv_cpu.manifest import MANIFEST

DEVICE = MANIFEST.facts.profiles["avx512"]


def test_a_worker_gets_one_thread_a_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert MANIFEST.worker_env(DEVICE, 0)["OMP_NUM_THREADS"] == str(host.usable_cores())


@every("said", ["1", "3"])
def test_the_operators_own_number_of_threads_wins(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert MANIFEST.worker_env(DEVICE, 0) == {"OMP_NUM_THREADS": said}
    assert host.threads() == int(said)


@every("nonsense", ["", "0", "many", "-2"])
def test_what_is_no_number_of_threads_is_not_taken(monkeypatch: pytest.MonkeyPatch, nonsense: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
    assert host.threads() == host.usable_cores()


@every(("text", "cores"), [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)])
def test_a_containers_quota_counts(tmp_path: Path, text: str, cores: int | None) -> None:
    (file := tmp_path / "cpu.max").write_text(text)
    assert host._quota(file) == cores


def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert host._quota(tmp_path / "missing") is None


@every(("processors", "cores"), [({0, 1}, 2), ({0, 4}, 1), ({0, 1, 4}, 2), (set(range(8)), 4)])
def test_cores_are_counted_by_which_threads_may_be_used(processors: set[int], cores: int, tmp_path: Path) -> None:
    """Of four cores with two threads each: 0 and 4 are siblings, and so on."""
    for number in range(8):
        (topology := tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert host._cores(processors, tmp_path) == cores


def test_without_a_word_on_siblings_every_processor_counts(tmp_path: Path) -> None:
    assert host._cores({0, 3}, tmp_path) == 2
