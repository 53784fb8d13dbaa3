"""`make test-flaky`: runs tests many times beside busy loops, and lists which failed how often.

    python tests/helpers/repeat_tests.py [-n 20] [TEST ...]

Each repetition is a process of its own. A loop per core, of the same priority as the tests, keeps the machine busy; the
loops end with this process. Without TEST, it runs the slowest of the last `make test`, and the fast tests that wait:
those in whose function, or in a fixture of whose file, something sleeps, waits, has a timeout, or is a signal, a thread
or a process.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
WAITS = {"sleep", "wait", "wait_for", "join", "communicate", "kill", "send_signal", "Popen", "Thread", "timeout"}
FAST = ("--tier", "fast")
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
ENDED = (0, 1)  # exit statuses of pytest: all passed, or some failed
SLOWEST = 30  # tests
SHOWN = 8000  # characters of the first failure's output


@dataclass
class Repetitions:
    """What became of the repetitions so far. `first`: the output of the first one in which a test failed."""

    runs: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def add(self, failed: Sequence[str], output: str) -> None:
        self.runs += 1
        self.failed.update(failed)
        if failed and not self.first:
            self.first = output

    def lines(self) -> Iterator[str]:
        if self.first:
            yield f"the first failure:\n{self.first[-SHOWN:]}"
        for test, count in self.failed.most_common():
            yield f"{count:3} of {self.runs} failed  {test}"
        yield f"{len(self.failed)} tests failed in {self.runs} runs"


def waiting_tests(root: Path = ROOT) -> list[str]:
    """The node ids of tests that wait."""
    return [test for path in sorted((root / "tests").rglob("test_*.py")) for test in _waiting_in(path, root)]


def slowest_tests(root: Path = ROOT) -> list[str]:
    """The node ids of the slowest tests of the last `make test`; none if there was no such run."""
    runs = sorted((root / "build" / "times").glob("*-test.jsonl"))
    rows = map(json.loads, runs[-1].read_text(encoding="utf-8").splitlines()) if runs else ()
    return [row["test"] for row in sorted(rows, key=lambda row: -row["wall"])[:SLOWEST]]


def repeat(tests: Sequence[str], times: int, options: Sequence[str] = (), root: Path = ROOT) -> Repetitions:
    """Run the tests so often. RuntimeError if they cannot be run."""
    repetitions = Repetitions()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", *options, *tests]
    for index in range(times):
        process = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if process.returncode not in ENDED:
            raise RuntimeError(
                f"pytest ended with status {process.returncode}:\n{process.stdout[-SHOWN:]}{process.stderr}"
            )
        repetitions.add(FAILED.findall(process.stdout), process.stdout)
        print(f"run {index + 1} of {times}: {process.stdout.splitlines()[-1]}", flush=True)
    return repetitions


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep so many cores busy. The loops end with the block, and with this process however that ends."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat tests beside busy loops, and list which failed how often.")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files or node ids (default: see above)")
    parser.add_argument("-n", dest="times", type=int, default=20, help="repetitions (default: 20)")
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 2, help="busy loops (default: one per core)")
    options = parser.parse_args()
    tests, selected = (options.tests, ()) if options.tests else ([*waiting_tests(), *slowest_tests()], FAST)
    print(f"{len(tests)} tests or files, {options.times} times beside {options.loops} busy loops", flush=True)
    with busy(options.loops):
        repetitions = repeat(tests, options.times, selected)
    print("\n".join(repetitions.lines()))
    return bool(repetitions.failed)


def _waiting_in(path: Path, root: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    fixtures = {definition.name for _, definition in _functions(tree) if _is_fixture(definition) and _waits(definition)}
    for owner, function in _functions(tree):
        arguments = {argument.arg for argument in function.args.args}
        if function.name.startswith("test_") and (_waits(function) or arguments & fixtures):
            yield "::".join([path.relative_to(root).as_posix(), *owner, function.name])


def _functions(tree: ast.Module) -> Iterator[tuple[list[str], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module and of its classes, with the name of the class."""
    for node in tree.body:
        owner = [node.name] if isinstance(node, ast.ClassDef) else []
        for definition in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, definition


def _is_fixture(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def _waits(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            joins_text = name == "join" and node.args
            if (name in WAITS and not joins_text) or any(keyword.arg == "timeout" for keyword in node.keywords):
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
