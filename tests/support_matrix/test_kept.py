"""What is kept by content: an entry holds for exactly one state of everything that it depends on."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from srv_matrix import kept as module
from srv_matrix.kept import code_files, kept, key_of

ROOT = Path(__file__).resolve().parents[2]

# Judges one variant, with every built-in platform loaded, and prints the files of the checkout that this has read.
JUDGE = """
import json, sys
from dataclasses import replace
from pathlib import Path
opened = set()
sys.addaudithook(lambda event, given: event == "open" and opened.add(str(given[0])))
from srv.platform.registry import find_platforms
from srv_matrix.judged import judge
manifests = {name: each.loaded for name, each in find_platforms().items()}
judge([replace(manifests["cuda"], variants=("sm90",))])
modules = [getattr(each, "__file__", None) for each in list(sys.modules.values())]
read = {Path(name) for name in (*opened, *filter(None, modules)) if not name.endswith(".pyc")}
root = Path(sys.argv[1])
print(json.dumps([str(path) for path in read if path.is_file() and path.is_relative_to(root)]))
"""


@pytest.mark.slow
def test_every_file_that_judging_reads_is_part_of_the_key() -> None:
    """Of the checkout; what is installed is part of it by its version."""
    process = subprocess.run(
        [sys.executable, "-c", JUDGE, str(ROOT)], capture_output=True, text=True, timeout=280, check=True
    )
    read = {path for path in json.loads(process.stdout) if ".venv" not in Path(path).parts}
    assert f"{ROOT}/core/srv/args/resolve.py" in read
    assert f"{ROOT}/support_matrix/srv_matrix/pairs.py" in read
    assert read - {str(path) for path in code_files("judged")} == set()


def test_an_edit_changes_the_key(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text("one")
    keys = [key_of([file]), key_of([file], "more"), key_of([])]
    file.write_text("two")
    assert len({*keys, key_of([file])}) == 4
    file.write_text("one")
    assert key_of([file]) == keys[0]


def test_a_result_is_computed_once_and_again_if_its_entry_is_damaged(tmp_path: Path) -> None:
    computed: list[int] = []

    def make() -> dict[str, int]:
        computed.append(1)
        return {"one": 1}

    def result() -> dict[str, int]:
        return kept(tmp_path, "made", "key", dict[str, int], make)

    assert (result(), result(), len(computed)) == ({"one": 1}, {"one": 1}, 1)
    path = tmp_path / "made-key.json"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-3], whole.replace(b'"one":1', b'"one":2'), b"{}"):
        path.write_bytes(damaged)
        before = len(computed)
        assert (result(), len(computed), path.read_bytes()) == ({"one": 1}, before + 1, whole)
    assert kept(tmp_path, "made", "key", list[str], lambda: ["another form"]) == ["another form"]


def test_entries_that_were_not_used_for_long_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 2)
    for key in ("a", "b", "a", "c"):
        kept(tmp_path, "made", key, str, lambda key=key: key)  # type: ignore[misc]
    assert {path.name for path in tmp_path.glob("*.json")} == {"made-a.json", "made-c.json"}


def test_without_a_writable_folder_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "below", "made", "key", str, lambda: "made") == "made"


def _write_down(folder: Path, barrier: object) -> None:
    def make() -> str:
        with (folder / "computed").open("a") as file:
            file.write("x")
        return "made"

    barrier.wait()  # type: ignore[attr-defined]
    assert kept(folder, "made", "key", str, make) == "made"


def test_of_processes_at_the_same_time_one_computes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_write_down, args=(tmp_path, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "computed").read_text() == "x"
