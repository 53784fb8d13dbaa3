"""The number of threads of a worker, by default and as set by the operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from every import every

from srv_cpu import host
from srv_cpu.manifest import MANIFEST

DEVICE = MANIFEST.facts.profiles["avx512"]


def test_a_worker_gets_one_thread_per_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert MANIFEST.worker_env(DEVICE, 0)["OMP_NUM_THREADS"] == str(host.usable_cores())


@every("number", ["1", "3"])
def test_omp_num_threads_of_the_operator_is_used(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    assert MANIFEST.worker_env(DEVICE, 0) == {"OMP_NUM_THREADS": number}
    assert host.threads() == int(number)


@every("invalid", ["", "0", "many", "-2"])
def test_invalid_omp_num_threads_is_ignored(monkeypatch: pytest.MonkeyPatch, invalid: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", invalid)
    assert host.threads() == host.usable_cores()


@every(("text", "cores"), [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)])
def test_cpu_quota_of_a_container_limits_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (file := tmp_path / "cpu.max").write_text(text)
    assert host._quota(file) == cores


def test_without_a_cgroup_there_is_no_quota(tmp_path: Path) -> None:
    assert host._quota(tmp_path / "missing") is None


@every(("processors", "cores"), [({0, 1}, 2), ({0, 4}, 1), ({0, 1, 4}, 2), (set(range(8)), 4)])
def test_sibling_threads_count_as_one_core(processors: set[int], cores: int, tmp_path: Path) -> None:
    """Four cores have two hardware threads each: 0 and 4 are siblings, and so on."""
    for number in range(8):
        (topology := tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert host._cores(processors, tmp_path) == cores


def test_without_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert host._cores({0, 3}, tmp_path) == 2
