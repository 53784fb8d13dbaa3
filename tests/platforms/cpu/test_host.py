"""The number of threads of a worker, by default and as set by the operator."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(
    ("threads", "ranks", "node_ranks", "expected"),
    [
        ("", 1, None, ""),
        ("", 2, 2, "8"),
        ("8", 1, None, "8"),
        ("8", 2, None, "4"),
        ("8", 16, None, "1"),
        ("32", 2, 1, "16"),  # two nodes of 16 cores, one rank on each
        ("32", 2, 2, "8"),  # both on one node
        ("4", 2, 2, "2"),
    ],
)
def test_ranks_share_the_threads_of_the_host_and_of_their_node(
    threads: str, ranks: int, node_ranks: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    host.share_threads(ranks, node_ranks)
    assert os.environ["OMP_NUM_THREADS"] == expected


@every(
    ("lines", "resident"),
    [
        ("VmRSS:\t 9000 kB\nRssAnon:\t 2000 kB\nRssFile:\t 4000 kB\nRssShmem:\t 3000 kB\n", 5000 * 1024),
        ("VmRSS:\t 9000 kB\n", None),
        (None, None),
    ],
)
def test_resident_memory_is_known_whether_or_not_the_system_tells_pages_of_files_apart(
    tmp_path: Path, lines: str | None, resident: int | None
) -> None:
    status = tmp_path / "status"
    if lines is not None:
        status.write_text(lines)
    size = host.resident_bytes(status)
    assert size == resident if resident is not None else size > 1 << 20
