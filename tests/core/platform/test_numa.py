"""NUMA nodes as the kernel lists them, and binding to one, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from every import every

from srv.errors import InternalError
from srv.platform import numa

# Binds to node 1 of a made-up list while another thread runs; prints the processors of that thread and of a later one.
BIND = """
import os, sys, threading
from pathlib import Path
from srv.platform import numa

found, go = [], threading.Event()

def report():
    go.wait()
    found.append(sorted(os.sched_getaffinity(0)))

threads = [threading.Thread(target=report)]
threads[0].start()
numa.bind_process(1, Path(sys.argv[1]))
threads.append(threading.Thread(target=report))
threads[1].start()
go.set()
for thread in threads:
    thread.join()
print(found)
"""


def nodes(folder: Path, **cpulists: str) -> Path:
    for name, cpulist in cpulists.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(f"{cpulist}\n")
    (folder / "online").write_text("0-1\n")
    return folder


@every(
    ("text", "numbers"),
    [("0-2,5\n", [0, 1, 2, 5]), ("7", [7]), ("\n", []), ("0-1,16-17", [0, 1, 16, 17])],
)
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    assert sorted(numa.parse_list(text)) == numbers
    assert numa.shown(numbers) == text.strip()


def test_nodes_and_their_processors(tmp_path: Path) -> None:
    root = nodes(tmp_path, node0="0-1", node10="", node2="2")
    assert numa.existing_nodes(root) == (0, 2, 10)
    assert [numa.processors(node, root) for node in (0, 2, 10, 3)] == [{0, 1}, {2}, set(), set()]
    assert numa.existing_nodes(tmp_path / "missing") == ()


def test_why_a_node_is_unfit(tmp_path: Path) -> None:
    (processor, *_) = os.sched_getaffinity(0)
    root = nodes(tmp_path, node0=str(processor), node1="", node2="1000000")
    assert numa.why_unfit(0, root) is None
    assert numa.why_unfit(5, root) == "there is no NUMA node 5; this host has the nodes 0, 1, 2"
    for node in (1, 2):
        reason = numa.why_unfit(node, root)
        assert reason is not None
        assert reason.startswith(f"this process may use none of the processors of NUMA node {node}, only ")
    assert numa.why_unfit(0, tmp_path / "missing") == f"this host shows no NUMA nodes ({tmp_path / 'missing'})"
    with pytest.raises(InternalError, match="there is no NUMA node 5"):
        numa.bind_process(5, root)


def test_threads_that_run_and_later_ones_are_bound(tmp_path: Path) -> None:
    last = max(os.sched_getaffinity(0))
    root = nodes(tmp_path, node0="0", node1=f"{last},1000000")
    command = [sys.executable, "-c", BIND, str(root)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == str([[last], [last]])
