"""Plants faults into copies of the tree, one at a time, and checks that the tests catch each of them.

    python tests/faults/plant.py [--area AREA ...] [--only NAME ...] [-j COPIES]
    python tests/faults/plant.py --list | --check

It exists so that tests can be slimmed: what was caught before a change to the tests must be caught after it. The tree
itself is never edited. Each copy is made under build/, imports its own packages (this is verified), and must pass the
tests before anything is planted in it.

    caught     a test failed, as it should                   ESCAPED   all tests passed
    HUNG       the tests did not end in time                 BROKEN    no test could run (for example, an import failed)
    STALE      the fault no longer fits the tree             UNPROVEN  its tests fail without the fault

A test that fails without any fault cannot catch one and is left out. The exit status is 1 if there is such a test, or
if a fault is not caught.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fault import ROOT, Fault, areas, duplicate_names

# Limits end hangs, also on a busy machine.
TEST_LIMIT_S = 300  # per test; pytest-timeout fails the test, so that its fixtures can still clean up
HANG_LIMIT_S = 60  # the same, for a fault that makes a test hang
RUN_LIMIT_S = 900  # per fault; after that the run is killed
BASELINE_LIMIT_S = 1800
SOURCE_ROOTS = ("core", "platforms/*", "plugins/*", "kernels", "support_matrix")
NATIVE_FOLDER = "kernels/srv_kernels/cpu"
OBJECTS = ROOT / "build" / "native-objects"  # of the native library; those of `make env`
NO_TEST_FAILED, TESTS_FAILED = 0, 1  # exit statuses of pytest
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # so that no bytecode can outlive the source that it was made from


@dataclass(frozen=True)
class Run:
    """How pytest ended. `status`: None if it was killed. `failed`: node ids. `end`: the last lines of its output."""

    status: int | None
    failed: tuple[str, ...]
    timed_out: bool
    end: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    verdict: str  # "caught", or one of the verdicts in capitals above
    detail: str  # the test that caught it, or the reason
    seconds: float = 0.0
    end: str = ""

    def line(self, width: int) -> str:
        return f"{self.verdict:8}  {self.fault.name:{width}}  {self.seconds:5.1f} s  {self.detail}"


class Copy:
    """A copy of the tree, in which pytest runs and faults are planted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.library = root.with_suffix(".so")  # compiled for native faults, which leave that of the copy alone
        packages = sorted(path.parent for folder in SOURCE_ROOTS for path in root.glob(f"{folder}/*/__init__.py"))
        self._packages = {path.name: path for path in packages}
        paths = dict.fromkeys(str(path.parent) for path in packages)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "PYTEST_"))}
        self._environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }

    def check_imports(self) -> None:
        """Raises RuntimeError unless every package is imported from this copy, and not from the tree."""
        script = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
        command = [sys.executable, "-P", "-c", script, *self._packages]
        process = subprocess.run(
            command, cwd=self.root, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        expected = [str(path / "__init__.py") for path in self._packages.values()]
        if process.stdout.split("\n")[:-1] != expected:
            raise RuntimeError(
                f"the packages are not imported from {self.root}:\n{process.stdout}{process.stderr[-2000:]}"
            )

    def pytest(
        self,
        tests: Sequence[str],
        *options: str,
        limit_s: float,
        tier: str = "fast",
        native: bool = False,
        **more: str,
    ) -> Run:
        """Run these tests; they must be of one folder (see `Fault.folder`). Of whole files, those of a tier."""
        arguments = ["-q", "--no-header", "--tb=short", "--hypothesis-seed=0", *options]
        if not tests[0].startswith("tests/"):
            arguments.append("--import-mode=prepend")  # tests of a plugin import modules beside them
        elif not all("::" in test for test in tests):
            arguments += ["--tier", tier]
        environment = {**self._environment, **({"SRV_CPU_LIBRARY": str(self.library)} if native else {}), **more}
        begin = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments, *tests],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
                status: int | None = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session, so nothing else is in this group
                output, _ = process.communicate()
                status = None
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
        timed_out = re.search(r"^E +Failed: Timeout", output, re.MULTILINE) is not None
        return Run(status, tuple(failed), timed_out, output[-4000:], time.monotonic() - begin)

    def try_fault(self, fault: Fault, failing: set[str]) -> Outcome:
        """Plant the fault, run its tests except those that fail anyway, and restore the file."""
        tests = [test for test in fault.tests if test not in failing]
        if not tests:
            return Outcome(fault, "UNPROVEN", f"fails without the fault: {', '.join(fault.tests)}")
        deselected = [f"--deselect={test}" for test in sorted(failing)]
        with self.restored(fault.file):
            fault.plant(self.root)
            if fault.is_native:
                self.compile_library()
            options = ["-x", f"--timeout={HANG_LIMIT_S if fault.hangs else TEST_LIMIT_S}", *deselected]
            run = self.pytest(tests, *options, limit_s=RUN_LIMIT_S, native=fault.is_native, **NO_BYTECODE)
        return judge(fault, run)

    @contextmanager
    def restored(self, file: str) -> Iterator[Path]:
        """The path of a file of this copy that may be changed: it is restored at the end."""
        path = self.root / file
        original, times = path.read_bytes(), path.stat()
        try:
            yield path
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def compile_library(self) -> None:
        """Compile the native library of this copy; objects of sources without a fault are those of other builds."""
        _build_module(self.root).build(self.library, objects=OBJECTS)


def judge(fault: Fault, run: Run) -> Outcome:
    """Whether the fault was caught by this run of its tests."""
    if run.status is None or run.timed_out:
        detail = run.failed[0] if run.failed else f"killed after {RUN_LIMIT_S} s"
        return Outcome(fault, "caught" if fault.hangs else "HUNG", detail, run.seconds, run.end)
    if run.status == TESTS_FAILED and run.failed:
        return Outcome(fault, "caught", run.failed[0], run.seconds)
    if run.status == NO_TEST_FAILED:
        return Outcome(fault, "ESCAPED", f"{fault.effect} ({', '.join(fault.tests)})", run.seconds)
    return Outcome(fault, "BROKEN", f"pytest ended with status {run.status}", run.seconds, run.end)


def _build_module(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_of_copy", root / NATIVE_FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(to: Path) -> Copy:
    """Copy what git tracks or does not ignore, and the native library if it was built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    native = [str(path.relative_to(ROOT)) for path in (ROOT / NATIVE_FOLDER / "native").glob("*.so")]
    for name in [*filter(None, listed), *native]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    copy = Copy(to)
    copy.check_imports()
    return copy


def clone(copy: Copy, to: Path) -> Copy:
    """A second copy, including the bytecode that the first one has compiled."""
    shutil.copytree(copy.root, to)
    cloned = Copy(to)
    cloned.check_imports()
    return cloned


def failing_unplanted(copy: Copy, faults: Sequence[Fault], jobs: int) -> set[str]:
    """Node ids that fail although nothing is planted. Raises RuntimeError if the tests cannot be run."""
    failing: set[str] = set()
    groups: dict[tuple[bool, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.is_native, fault.folder), []).append(fault)
    for (native, folder), members in groups.items():
        if native:
            copy.compile_library()
        tests = list(dict.fromkeys(test for fault in members for test in fault.tests))
        parallel = ["-n", str(jobs)] if folder == "tests" else []
        run = copy.pytest(tests, *parallel, f"--timeout={5 * TEST_LIMIT_S}", limit_s=BASELINE_LIMIT_S, native=native)
        if run.status not in (NO_TEST_FAILED, TESTS_FAILED):
            raise RuntimeError(f"pytest ended with status {run.status} although nothing was planted:\n{run.end}")
        failing.update(run.failed)
    return failing


def plant_all(faults: Sequence[Fault], jobs: int, width: int) -> tuple[list[Outcome], set[str]]:
    """Try every fault, `jobs` at a time, and print each outcome as it becomes known.

    Returns the outcomes, and the tests that fail without any fault.
    """
    outcomes = [Outcome(fault, "STALE", reason) for fault in faults if (reason := fault.stale()) is not None]
    fresh = [fault for fault in faults if fault not in {outcome.fault for outcome in outcomes}]
    for outcome in outcomes:
        print(outcome.line(width), flush=True)
    if not fresh:
        return outcomes, set()
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-", dir=ROOT / "build") as folder:
        begin = time.monotonic()
        first = copy_tree(Path(folder) / "0")
        failing = failing_unplanted(first, fresh, jobs)
        print(f"nothing planted: {len(failing)} tests fail ({time.monotonic() - begin:.0f} s)", flush=True)
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in [first, *(clone(first, Path(folder) / str(index)) for index in range(1, jobs))]:
            copies.put(copy)

        def try_one(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                outcome = copy.try_fault(fault, failing)
            finally:
                copies.put(copy)
            print(outcome.line(width), flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            outcomes += pool.map(try_one, sorted(fresh, key=lambda fault: not fault.is_native))
    return outcomes, failing


def report(outcomes: Sequence[Outcome], failing: set[str], width: int, seconds: float) -> int:
    """Print what was not caught; the exit status."""
    missed = [outcome for outcome in outcomes if outcome.verdict != "caught"]
    print(f"\n{len(outcomes) - len(missed)} of {len(outcomes)} faults caught in {seconds:.0f} s")
    for outcome in missed:
        print(outcome.line(width))
        if outcome.end:
            print("    " + outcome.end.strip().replace("\n", "\n    "))
    for test in sorted(failing):
        print(f"fails without any fault: {test}")
    return bool(missed or failing)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant faults and check that the tests catch them.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--area", nargs="+", metavar="AREA", help="the faults of these areas")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    parser.add_argument("--check", action="store_true", help="check that every fault fits the tree, and end")
    parser.add_argument("-j", dest="jobs", type=int, default=2, metavar="COPIES", help="faults at a time (default: 2)")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Fault]:
    """The faults that the options ask for. SystemExit if they name one, or an area, that does not exist."""
    by_area = areas()
    everything = [fault for faults in by_area.values() for fault in faults]
    if twice := list(duplicate_names(everything)):
        sys.exit(f"two faults have the name {twice[0]}")
    if unknown := [
        *(set(options.area or ()) - by_area.keys()),
        *(set(options.only or ()) - {f.name for f in everything}),
    ]:
        sys.exit(f"no such fault or area: {', '.join(sorted(unknown))}; --list shows them all")
    faults = [fault for area in options.area or by_area for fault in by_area[area]]
    return [fault for fault in faults if fault.name in options.only] if options.only else faults


def main() -> int:
    options = parse()
    faults = chosen(options)
    width = max(len(fault.name) for fault in faults)
    if options.list:
        for fault in faults:
            print(f"{fault.name:{width}}  {fault.effect}")
        return 0
    if options.check:
        reasons = [f"{fault.name}: {reason}" for fault in faults if (reason := fault.stale()) is not None]
        print("\n".join([*reasons, f"{len(faults) - len(reasons)} of {len(faults)} faults fit the tree"]))
        return bool(reasons)
    begin = time.monotonic()
    outcomes, failing = plant_all(faults, options.jobs, width)
    return report(outcomes, failing, width, time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
