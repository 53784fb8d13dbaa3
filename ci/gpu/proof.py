"""Runs the stages of a proof on a GPU, each under its own time limit, and prints a table. Standard library only, so
that there is a table even where nothing could be installed.

    proof.py [--device cuda] [--simulated] [--stages NAME...] [--seconds 570] [--out FOLDER]

Written to FOLDER as it goes: `results.json` (outcomes, seconds and figures of the stages), `table.md`, a log of each
stage, and what the stages write. A run of some stages keeps the results of the others that are in FOLDER already.
Exit status: 0 if every stage passed or was passed over with a reason, 1 otherwise, 2 for an invalid command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from time import monotonic
from typing import TextIO

from limits import run_limited, stop_group
from outcomes import Result, figure_of, markdown, outcome_of
from stages import EVIDENCE, HERE, ROOT, SIMULATOR, Options, Stage, stages

DEVICES = ("cuda", "rocm", "xpu")
LEAST_SECONDS = 5.0  # a stage that has less is not started
JIT_WAIT_S = 60.0


class Proof:
    """One run: its options, its deadline, and the results so far."""

    def __init__(self, options: Options, deadline: float) -> None:
        self._options, self._deadline = options, deadline
        self._file = options.out / "results.json"
        saved = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []
        results = [Result(**fields) for fields in saved]
        # Of an earlier run on the same device; those of another one do not belong into this table.
        place = (options.device, options.simulated)
        self.results = {result.stage: result for result in results if (result.device, result.simulated) == place}
        self._compilation: subprocess.Popen[bytes] | None = None

    def run(self, selected: Sequence[Stage]) -> None:
        """Run these stages. Results are on disk as soon as a stage has ended."""
        try:
            later = list(selected)
            for group in groups(selected, self._options.workers):
                later = [stage for stage in later if stage not in group]
                limits = self._limits(group, later)
                with ThreadPoolExecutor(len(group)) as threads:
                    for future in as_completed([threads.submit(self._run, *limited) for limited in limits]):
                        self._record(future.result())
                if group[0].name == "environment":
                    self._start_compiling()
        finally:
            if self._compilation is not None:
                stop_group(self._compilation)

    def _limits(self, group: Sequence[Stage], later: Sequence[Stage]) -> list[tuple[Stage, float]]:
        """Each stage of a group with its seconds. Stages beside others have all the time that the later ones leave."""
        seconds = self._deadline - monotonic()
        if len(group) == 1:
            return [(group[0], min(group[0].seconds, seconds))]
        reserved = sum(stage.seconds for stage in later)
        return [(stage, seconds - reserved) for stage in group]

    def _run(self, stage: Stage, seconds: float) -> Result:
        if seconds < LEAST_SECONDS:
            return self._result(stage, "no time left", 0.0, "")
        print(f"== {stage.name}: {stage.what} (at most {seconds:.0f} s)", flush=True)
        log = self._options.out / f"log-{stage.name}.txt"
        with log.open("w", encoding="utf-8") as file:
            file.write(f"\n== {stage.name}: {' '.join(stage.command)}\n")
            command = [*stage.command, *(self._speed_arguments(file, seconds) if stage.name == "speed" else [])]
            environment = {"TRITON_INTERPRET": "1" if self._options.simulated else "0", **stage.environment}
            ended = run_limited(command, file, seconds, environment=environment, folder=ROOT)
        text = log.read_text(encoding="utf-8", errors="replace")
        return self._result(stage, outcome_of(ended.status), round(ended.seconds, 1), figure_of(stage.name, text))

    def _result(self, stage: Stage, outcome: str, seconds: float, figure: str) -> Result:
        options = self._options
        return Result(stage.name, stage.what, outcome, seconds, figure, options.simulated, options.device)

    def _record(self, result: Result) -> None:
        self.results[result.stage] = result
        if result.stage == "evidence" and self._options.can_commit:
            for file in (ROOT / EVIDENCE).glob(f"{self._options.device}-*.jsonl"):
                shutil.copy(file, self._options.out)
        saved = [outcome.as_json() for outcome in self.results.values()]
        self._file.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        (self._options.out / "table.md").write_text(markdown(list(self.results.values())), encoding="utf-8")
        print(f"   {result.outcome}, {result.seconds:.0f} s: {result.figure}", flush=True)

    def _passed_over(self) -> dict[str, str]:
        """Backends that cannot work here, each with the reason, from the environment's report."""
        file = self._options.out / "environment.json"
        report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"passed_over": {}}
        return dict(report["passed_over"])

    def _start_compiling(self) -> None:
        """FlashInfer compiles its kernels at run time, which takes minutes: in the background of the other stages."""
        options = self._options
        if options.simulated or options.device != "cuda" or "flashinfer" in self._passed_over():
            return
        log = (options.out / "log-jit.txt").open("w", encoding="utf-8")
        with log:
            command = [sys.executable, str(HERE / "flashinfer_kernels.py"), options.device]
            self._compilation = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def _speed_arguments(self, log: TextIO, seconds: float) -> list[str]:
        """Further arguments of the speed stage: its seconds, and the backends that it passes over.

        Waits for FlashInfer's kernels, because compiling beside a measurement would falsify it.
        """
        passed_over, started = self._passed_over(), monotonic()
        if self._compilation is not None:
            try:
                if self._compilation.wait(min(JIT_WAIT_S, seconds / 2)) != 0:
                    passed_over["flashinfer"] = "its kernels could not be compiled: see log-jit.txt"
            except subprocess.TimeoutExpired:
                passed_over["flashinfer"] = "its kernels were still being compiled when the measurements began"
                stop_group(self._compilation)
        log.write(f"waited {monotonic() - started:.0f} s for FlashInfer's kernels\n")
        arguments = ["--seconds", f"{seconds - (monotonic() - started) - LEAST_SECONDS / 2:.0f}"]
        for backend, reason in passed_over.items():
            arguments += ["--passed-over", f"{backend}={reason}"]
        return arguments


def groups(selected: Sequence[Stage], workers: int) -> list[list[Stage]]:
    """Stages that run beside one another. One at a time on a small machine; else speeds alone, behind all others."""
    if workers == 1:
        return [[stage] for stage in selected]
    first = [[stage] for stage in selected if stage.name == "environment"]
    beside = [stage for stage in selected if stage.name not in ("environment", "speed")]
    return [*first, *([beside] if beside else []), *([stage] for stage in selected if stage.name == "speed")]


def clean_checkout() -> bool:
    """Whether this tree is a git checkout without changes, which evidence names."""
    try:
        process = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return process.returncode == 0 and not process.stdout.strip()


def _workers() -> int:
    """Processes for the tests of kernels, most of whose time is compilation: half of the cores, up to eight."""
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if importlib.util.find_spec("xdist") else 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/gpu/run.sh", description="Prove srv on a GPU: one run, one table.")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="platform to prove (default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help=f"on the GPU of ${SIMULATOR}: small, without speeds")
    parser.add_argument("--smallest", action="store_true", help="with --simulated: as little per stage as possible")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="run only these stages")
    parser.add_argument("--seconds", type=float, default=570.0, help="time limit of the run (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-proof"))
    options = parser.parse_args(arguments)
    if options.simulated != bool(os.environ.get(SIMULATOR)):
        parser.error(f"--simulated and {SIMULATOR} go together: with one of them, the device would not be what it says")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    real = not options.simulated
    proof = Options(
        options.device, out, options.simulated, options.smallest, real and clean_checkout(), _workers() if real else 1
    )
    by_name = {stage.name: stage for stage in stages(proof)}
    unknown = [name for name in options.stages or [] if name not in by_name]
    if unknown:
        parser.error(f"there is no stage {', '.join(unknown)}; stages are {', '.join(by_name)}")
    selected = [stage for name, stage in by_name.items() if options.stages is None or name in options.stages]
    run = Proof(proof, monotonic() + options.seconds)
    run.run(selected)
    print("\n" + markdown([result for name in by_name if (result := run.results.get(name))]))
    print(f"results: {out}")
    return 0 if all(run.results[stage.name].good for stage in selected) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
