"""`make check` finds what has changed, and runs the nearest tests within a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from check_change import changed_files, static_checks
from nearest_tests import ImportGraph, waves

TREE = {
    "pyproject.toml": """
[tool.importlinter]
root_packages = ["near_core"]
[tool.pytest.ini_options]
pythonpath = ["tests/helpers"]
""",
    "CONTRIBUTING.md": "| code | tests |\n|---|---|\n| `core/near_core/sched` | `tests/core/sched`, `tests/e2e` |\n",
    "core/near_core/__init__.py": "",
    "core/near_core/errors.py": "",
    "core/near_core/sched/__init__.py": "",
    "core/near_core/sched/queue.py": "from near_core.errors import SrvError\n",
    "core/near_core/sched/loop.py": "def run():\n    from near_core.sched import queue\n",
    "core/near_core/plugin.py": "ENTRY = 'near_core.sched.loop:run'\n",
    "core/near_core/typed.py": "if TYPE_CHECKING:\n    import near_core.sched.queue\n",
    "docs/queue.md": "",
    "tests/helpers/driver.py": "import near_core.sched.loop\n",
    "tests/core/sched/test_queue.py": "from near_core.sched.queue import Queue\n",
    "tests/core/sched/test_loop.py": "def test_it():\n    from driver import run\n",
    "tests/core/conftest.py": "import near_core.typed\n",
    "tests/core/test_plugin.py": "PLUGIN = 'near_core.plugin'\n",
    "tests/e2e/test_server.py": "",
    "tests/test_docs.py": "PAGE = ROOT / 'queue.md'\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "core"))
    return tmp_path


def test_tests_are_ranked_by_the_imports_between_them_and_the_change(tree: Path) -> None:
    """Lazy imports, helpers, modules in strings and the table of CONTRIBUTING.md count; imports for types do not."""
    queue, loop = "tests/core/sched/test_queue.py", "tests/core/sched/test_loop.py"
    plugin = "tests/core/test_plugin.py"
    server, docs = "tests/e2e/test_server.py", "tests/test_docs.py"
    graph = ImportGraph(tree)
    cases = {
        "core/near_core/sched/queue.py": [(queue, 1), (loop, 2), (plugin, 3), (server, 3)],
        "core/near_core/sched/loop.py": [(loop, 1), (plugin, 2), (queue, 3), (server, 3)],
        "core/near_core/errors.py": [(queue, 2), (loop, 4), (plugin, 4)],
        "core/near_core/typed.py": [(loop, 2), (queue, 2), (plugin, 2)],
        "tests/helpers/driver.py": [(loop, 1)],
        docs: [(docs, 0)],
        "docs/queue.md": [(docs, 2)],
        "docs/other.md": [],
    }

    by_change = {changed: [(test.file, test.distance) for test in graph.nearest([changed])] for changed in cases}
    assert {changed: sorted(tests) for changed, tests in by_change.items()} == {c: sorted(t) for c, t in cases.items()}
    assert all(tests == sorted(tests, key=lambda test: test[1]) for tests in by_change.values())
    assert [test.file for test in graph.nearest(["core/near_core/errors.py", docs])][:2] == [docs, queue]


def test_waves_grow_and_leave_nothing_out() -> None:
    files = [str(index) for index in range(30)]
    assert [len(wave) for wave in waves(files)] == [8, 16, 6]
    assert [file for wave in waves(files) for file in wave] == files


def test_changes_are_those_since_the_common_ancestor_committed_or_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text, encoding="utf-8")

    git("init", "-b", "main")
    for name in ("kept", "edited", "deleted", ".gitignore"):
        write(name, "ignored\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("switch", "-c", "work")
    write("committed", "")
    git("add", ".")
    git("commit", "-m", "second")
    write("edited", "2")
    write("untracked", "")
    write("ignored", "")
    (tmp_path / "deleted").unlink()
    assert changed_files("HEAD", tmp_path) == ["deleted", "edited", "untracked"]
    assert changed_files("main", tmp_path) == ["committed", "deleted", "edited", "untracked"]


def test_each_kind_of_file_gets_its_checks() -> None:
    core, test, page = "core/srv/sched/__init__.py", "tests/house/test_every.py", "docs/index.md"
    assert list(static_checks([page])) == []
    assert [command[0] for command in static_checks([test, page])] == ["ruff", "ruff"]
    commands = list(static_checks([core, test]))
    assert [command[0] for command in commands] == ["ruff", "ruff", "lint-imports", "mypy"]
    assert commands[-1] == ["mypy", "-m", "srv.sched"]


def test_no_test_begins_when_the_time_is_up_and_its_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): ...\n", encoding="utf-8")
    (tmp_path / "test_two.py").write_text(
        "import time\n"
        "def test_two():\n"
        "    begin = time.monotonic()\n"
        "    time.monotonic = lambda: begin + 1000\n"
        "def test_three(): assert False\n",
        encoding="utf-8",
    )
    helpers = Path(__file__).resolve().parents[1] / "helpers"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {helpers}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "time_budget", "--seconds", "500", "--left-out", "rest"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "2 passed, 1 skipped" in process.stdout, process.stdout + process.stderr
    assert (tmp_path / "rest").read_text(encoding="utf-8") == "test_two.py\n"
