"""`make check`: checks format, lint and types of what has changed, and runs the fast tests that are nearest to it.

    python tests/helpers/check_change.py [--base REV] [--seconds N]

A convenience without promises: it takes under a minute for a change of one module, and says how many test files it did
not run. `make test` runs everything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nearest_tests import ImportGraph, Nearest, waves

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PYTEST = (
    "python",
    "-m",
    "pytest",
    "-q",
    "--no-header",
    "-r",
    "fE",
    "--tier",
    "fast",
    "-p",
    "time_budget",
)
LEFT_OUT = ROOT / "build" / "check" / "left-out.txt"
SHORTEST_S = 8  # with less time left, importing torch would leave none for tests
ALONE = 8  # so many files take one process less time than two
ENDED_WELL = (0, 5)  # exit statuses of pytest: all passed, or there was no fast test


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """What differs from the newest common ancestor of HEAD and `base`, committed or not, and what was deleted."""
    ancestor = _git(root, "merge-base", base, "HEAD")
    listed = [*_git(root, "diff", "--name-only", *ancestor), *_git(root, "ls-files", "--others", "--exclude-standard")]
    return list(dict.fromkeys(listed))


def static_checks(changed: Sequence[str]) -> Iterator[list[str]]:
    """The commands that check the changed files without running them."""
    python = [name for name in changed if name.endswith(".py")]
    typed = [name for folder in ("core/", "support_matrix/") for name in python if name.startswith(folder)]
    if python:
        yield ["ruff", "format", "--check", *python]
        yield ["ruff", "check", *python]
    if any(name.startswith(("core/", "platforms/", "kernels/", "support_matrix/")) for name in python):
        yield ["lint-imports", "--no-logo"]
    if modules := [".".join(Path(name).with_suffix("").parts[1:]).removesuffix(".__init__") for name in typed]:
        yield ["mypy", *(argument for module in modules for argument in ("-m", module))]


def run_tests(nearest: Sequence[Nearest], seconds: float) -> tuple[bool, int]:
    """Run fast tests, the nearest files first, until one fails or the time is up.

    Returns whether all passed, and how many files were left out, at least in part.
    """
    LEFT_OUT.parent.mkdir(parents=True, exist_ok=True)
    rest = [test.file for test in nearest]
    for files in waves(rest):
        begin = time.monotonic()
        LEFT_OUT.unlink(missing_ok=True)
        status = _run([*PYTEST, "--seconds", str(seconds), "--left-out", str(LEFT_OUT), *_workers(files), *files])
        left_out = LEFT_OUT.read_text(encoding="utf-8").splitlines() if LEFT_OUT.exists() else files
        rest = rest[len(files) :]
        seconds -= time.monotonic() - begin
        if status not in ENDED_WELL or left_out or seconds < SHORTEST_S:
            return status in ENDED_WELL, len(rest) + len(left_out)
    return True, 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Check what has changed: format, lint, types and the nearest tests.")
    parser.add_argument("--base", default="HEAD", help="what changed since this revision (default: HEAD)")
    parser.add_argument("--seconds", type=float, default=40, help="of tests; none begins after that (default: 40)")
    options = parser.parse_args()
    listed = changed_files(options.base)
    if not listed:
        print(f"nothing has changed since {options.base}; BASE=REV names another revision")
        return 0
    changed = [name for name in listed if (ROOT / name).is_file()]
    failed = [command[0] for command in static_checks(changed) if _run(command) != 0]
    nearest = ImportGraph(ROOT).nearest(changed)
    passed, left_out = run_tests(nearest, options.seconds)
    print(f"{len(changed)} changed files; imports lead to them from {len(nearest)} test files")
    if len(changed) < len(listed):
        print(f"{len(listed) - len(changed)} files were deleted; make lint and make test find what imported them")
    if left_out:
        print(f"{left_out} of these files, the furthest away, were not run, or not to the end; make test runs all")
    if failed := [*failed, *([] if passed else ["pytest"])]:
        print(f"failed: {', '.join(dict.fromkeys(failed))}")
    return bool(failed)


def _workers(files: Sequence[str]) -> list[str]:
    return ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"] if len(files) > ALONE else []


def _run(command: Sequence[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment, check=False).returncode


def _git(root: Path, *arguments: str) -> list[str]:
    process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return process.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
