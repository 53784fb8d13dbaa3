"""Draws modules at random, plants one random fault in a copy of each, and runs tests until one catches it.

    PYTHONPATH=tests/helpers python tests/faults/drawn.py [--seed N] [--count N] [--limit SECONDS] [-j COPIES]
    PYTHONPATH=tests/helpers python tests/faults/drawn.py --list

The hand-written faults beside this file show that what was caught stays caught; these show what nobody has thought of.
Every Python module of core, the platforms and the kernels is as likely as any other; C++ is left out, as each fault
would compile for minutes. Test files run as `make check` orders them, the nearest first and then all others: the fast
tests of all files, then the slow ones, then the proofs. A test that fails counts if it passes with a comment in place
of the fault, so that tests which compare sources with what is recorded of them catch nothing.

    caught    a test failed, or could not be imported
    ESCAPED   all tests passed: a test is missing, or the fault changes nothing that can be seen
    TIME UP   no test had failed by the limit

Each outcome is a line of build/faults-drawn/SEED.jsonl. A second run continues: it tries what was not caught again.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fault import ROOT
from mutations import Mutation, commented, draw
from nearest_tests import ImportGraph, waves
from plant import NO_BYTECODE, NO_TEST_FAILED, TEST_LIMIT_S, Copy, Run, clone, copy_tree
from tiers import TIERS

PACKAGES = ("core", "platforms", "plugins", "kernels", "support_matrix")  # the folders that have some
MODULES = ("core/srv/*.py", "platforms/*/srv_*/*.py", "kernels/srv_kernels/*.py")
LONG_LIMIT_S = 1800  # per test of the slow tiers
NO_TESTS = 5  # exit status of pytest
CAUGHT, ESCAPED, TIME_UP = "caught", "ESCAPED", "TIME UP"


@dataclass(frozen=True)
class Drawn:
    """A fault, and the module in which it is planted."""

    module: str
    mutation: Mutation

    @property
    def identity(self) -> tuple[str, int, str, str]:
        """What is the same in a later run, unless the module has changed."""
        return self.module, self.mutation.line, self.mutation.before, self.mutation.after


@dataclass(frozen=True)
class Outcome:
    """A line of the record. `test` and `tier`: what caught the fault. `seconds`: until then."""

    seed: int
    module: str
    line: int
    kind: str
    before: str
    after: str
    verdict: str
    test: str
    tier: str
    seconds: float

    @property
    def identity(self) -> tuple[str, int, str, str]:
        return self.module, self.line, self.before, self.after

    def row(self) -> str:
        place = f"{self.module}:{self.line}"
        return f"{self.verdict:8} {self.tier:5} {self.seconds:6.0f} s  {place:60} {self.kind:20} {self.test}"


def draw_modules(seed: int, count: int, root: Path = ROOT) -> Iterator[Drawn]:
    """`count` modules and a fault of each. A larger count only adds to them, and another module moves none of them."""
    listed = subprocess.run(["git", "ls-files", "-z", *MODULES], cwd=root, capture_output=True, check=True)
    modules = filter(None, listed.stdout.decode().split("\0"))
    for module in sorted(modules, key=lambda module: random.Random(f"{seed} of {module}").random()):
        if count == 0:
            return
        source = (root / module).read_text(encoding="utf-8")
        if (mutation := draw(source, random.Random(f"{seed} {module}"))) is not None:
            count -= 1
            yield Drawn(module, mutation)


class Hunt:
    """Runs the tests on one planted fault after another in a copy of the tree."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._failing: set[str] = set()  # tests that fail without a fault

    def hunt(self, seed: int, drawn: Drawn, files: Sequence[str], limit_s: float) -> Outcome:
        begin = time.monotonic()
        verdict, test, tier = self._verdict(drawn, files, begin + limit_s)
        seconds = round(time.monotonic() - begin, 1)
        change = drawn.mutation
        return Outcome(
            seed, drawn.module, change.line, change.kind, change.before, change.after, verdict, test, tier, seconds
        )

    def _verdict(self, drawn: Drawn, files: Sequence[str], until: float) -> tuple[str, str, str]:
        """The verdict, the test that caught the fault, and its tier."""
        for tier in TIERS:
            for wave in waves([file for file in files if file not in self._failing]):
                try:
                    test = self._first_that_sees(drawn, tier, list(wave), until)
                except TimeoutError:
                    return TIME_UP, "", tier
                if test is not None:
                    return CAUGHT, test, tier
        return ESCAPED, "", ""

    def _first_that_sees(self, drawn: Drawn, tier: str, files: list[str], until: float) -> str | None:
        """The first test of these files that fails with the fault and not without. TimeoutError after `until`."""
        original = (self._copy.root / drawn.module).read_text(encoding="utf-8")
        while files:
            run = self._run(drawn.module, drawn.mutation.source, files, tier, until - time.monotonic())
            if run.status is None:
                raise TimeoutError
            if run.status in (NO_TEST_FAILED, NO_TESTS):
                return None
            test = run.failed[0] if run.failed else files[0]  # without a failed test, pytest itself has not started
            alone = self._run(drawn.module, drawn.mutation.source, [test], tier, LONG_LIMIT_S)
            without = self._run(drawn.module, commented(original, drawn.mutation.line), [test], tier, LONG_LIMIT_S)
            if alone.status not in (NO_TEST_FAILED, NO_TESTS) and without.status in (NO_TEST_FAILED, NO_TESTS):
                return test
            file = test.partition("::")[0]
            if test == file or test in self._failing:  # a file cannot be deselected
                files.remove(file)
            self._failing.add(test)
        return None

    def _run(self, module: str, source: str, tests: Sequence[str], tier: str, limit_s: float) -> Run:
        limit = TEST_LIMIT_S if tier == "fast" else LONG_LIMIT_S
        deselected = [f"--deselect={test}" for test in sorted(self._failing - {*tests})]
        with self._copy.restored(module) as path:
            path.write_text(source, encoding="utf-8")
            return self._copy.pytest(
                tests, "-x", f"--timeout={limit}", *deselected, limit_s=limit_s, tier=tier, **NO_BYTECODE
            )


def hunt_all(faults: Sequence[Drawn], options: argparse.Namespace, record: Path) -> list[Outcome]:
    """Try each fault that is not recorded as caught, print its outcome and write it down."""
    outcomes_before = recorded(record)
    outcomes = [outcomes_before[fault.identity] for fault in faults if fault.identity in outcomes_before]
    graph = ImportGraph(ROOT)
    record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-", dir=ROOT / "build") as folder:
        first = copy_with_history(Path(folder) / "0")
        hunts: queue.SimpleQueue[Hunt] = queue.SimpleQueue()
        for copy in [first, *(clone(first, Path(folder) / str(index)) for index in range(1, options.jobs))]:
            hunts.put(Hunt(copy))

        def try_one(drawn: Drawn) -> Outcome:
            near = [test.file for test in graph.nearest([drawn.module])]
            hunt = hunts.get()
            try:
                outcome = hunt.hunt(
                    options.seed, drawn, [*near, *sorted({*graph.test_files()} - {*near})], options.limit
                )
            finally:
                hunts.put(hunt)
            print(shown(outcome), flush=True)
            with record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
            return outcome

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes += pool.map(try_one, [fault for fault in faults if fault.identity not in outcomes_before])
    return outcomes


def copy_with_history(to: Path) -> Copy:
    """A copy that is a repository too: some tests ask git for commits, or for what is tracked. Its packages are
    compiled, as no later run of pytest may write bytecode."""
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(to)], check=True)
    subprocess.run(["git", "reset", "--quiet"], cwd=to, check=True)
    copy = copy_tree(to)
    subprocess.run([sys.executable, "-m", "compileall", "-q", *PACKAGES], cwd=to, check=True)
    return copy


def recorded(record: Path) -> Mapping[tuple[str, int, str, str], Outcome]:
    """What earlier runs have caught."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {outcome.identity: outcome for outcome in outcomes if outcome.verdict == CAUGHT}


def shown(outcome: Outcome) -> str:
    before = (f"      - {line.strip()}" for line in outcome.before.splitlines())
    after = (f"      + {line.strip()}" for line in outcome.after.splitlines())
    return "\n".join([outcome.row(), *before, *after])


def report(outcomes: Sequence[Outcome], seed: int) -> int:
    """Print all outcomes in a table, and what was caught by how many tiers; the exit status."""
    print(f"\nseed {seed}")
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.verdict != CAUGHT, outcome.module)):
        print(outcome.row() if outcome.verdict == CAUGHT else shown(outcome))
    caught = [outcome.tier for outcome in outcomes if outcome.verdict == CAUGHT]
    two = sum(tier != "proof" for tier in caught)
    print(f"{len(outcomes)} faults: {two} caught by the fast and the slow tests, {len(caught)} with the proofs")
    return len(caught) < len(outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant random faults in random modules and run tests until one fails.")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(default: a random one)"
    )
    parser.add_argument("--count", type=int, default=30, help="how many modules (default: 30)")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="per fault (default: 1800)")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    parser.add_argument("-j", dest="jobs", type=int, default=2, metavar="COPIES", help="faults at a time (default: 2)")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    faults = list(draw_modules(options.seed, options.count))
    if options.list:
        for fault in faults:
            print(f"{fault.module}:{fault.mutation.line} {fault.mutation.kind}")
        return 0
    record = ROOT / "build" / "faults-drawn" / f"{options.seed}.jsonl"
    outcomes = hunt_all(faults, options, record)
    print(f"recorded in {record.relative_to(ROOT)}")
    return report(outcomes, options.seed)


if __name__ == "__main__":
    sys.exit(main())
