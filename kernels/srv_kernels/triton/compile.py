"""Ahead-of-time compilation of every kernel for every target, without a GPU, and the committed table of the results.

    python -m srv_kernels.triton.compile           compile what is not in compiled.json, and write it
    python -m srv_kernels.triton.compile --check   compile what has changed and a sample; fail if the table is not right

compiled.json has, for each kernel, a digest of its source, and for each variant and target: registers per thread,
spills (bytes of stack on NVIDIA, vector registers on AMD) and bytes of shared memory. Another version of Triton makes
the whole table stale. Results are evidence that a kernel compiles ("compiled"), not that it is right.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("compiled.json")
_WORKER = (sys.executable, "-P", "-m", "srv_kernels.triton.compile_worker")


class Job(NamedTuple):
    """One variant of a kernel for one target."""

    kernel: str
    variant: str
    target: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if every job compiled and, with --check, the table is right."""
    options = _parser().parse_args(arguments)
    table = json.loads(options.table.read_text(encoding="utf-8")) if options.table.exists() else {}
    begin = time.monotonic()
    current = _listing()
    stale = [job for job in _jobs(current) if _recorded(table, current, job) is None]
    sample = _sample(table, current, stale, options.sample, options.seed) if options.check else []
    results = _compile([*stale, *sample], options.jobs)
    faults = [f"{_text(job)}: {result}" for job, result in results.items() if isinstance(result, str)]
    if options.check:
        faults += _differences(table, current, stale, sample, results)
    else:
        options.table.write_text(_formatted(_merged(table, current, results)), encoding="utf-8")
    print(f"{len(stale)} changed and {len(sample)} sampled of {len(list(_jobs(current)))} compilations", end=" ")
    print(f"in {time.monotonic() - begin:.0f} s with Triton {current['triton']}")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m srv_kernels.triton.compile", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is not right")
    parser.add_argument("--sample", type=int, default=24, help="how many unchanged compilations --check repeats")
    parser.add_argument("--seed", default=datetime.date.today().isoformat(), help="selects the sample; default: today")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--table", type=Path, default=TABLE)
    return parser


def _environment(cache: str) -> dict[str, str]:
    """Workers compile, rather than interpret, and take nothing from a cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Multiplications and additions are fused, which is the default of Triton 3.9 but not of 3.10.
    return {"TRITON_DEFAULT_FP_FUSION": "1", **environment, "TRITON_CACHE_DIR": cache}


def _listing() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [*_WORKER, "list"], env=_environment(cache), check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(process.stdout)  # type: ignore[no-any-return]


def _jobs(current: dict[str, Any]) -> Iterator[Job]:
    for kernel, entry in current["kernels"].items():
        for variant, targets in entry["variants"].items():
            yield from (Job(kernel, variant, target) for target in targets)


def _recorded(table: dict[str, Any], current: dict[str, Any], job: Job) -> list[int] | None:
    """The table's result of a job, unless it is of another source or version of Triton."""
    entry = table.get("kernels", {}).get(job.kernel, {})
    if table.get("triton") != current["triton"] or entry.get("source") != current["kernels"][job.kernel]["source"]:
        return None
    return entry["variants"].get(job.variant, {}).get(job.target)


def _sample(table: dict[str, Any], current: dict[str, Any], stale: Sequence[Job], count: int, seed: str) -> list[Job]:
    unchanged = sorted(set(_jobs(current)) - set(stale))
    return random.Random(seed).sample(unchanged, min(count, len(unchanged)))


def _compile(jobs: Sequence[Job], workers: int) -> dict[Job, list[int] | str]:
    """The result of each job, or why it has none."""
    shares = [share for index in range(workers) if (share := jobs[index::workers])]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(max(1, len(shares))) as pool:
        return {job: result for part in pool.map(lambda share: _share(share, cache), shares) for job, result in part}


def _share(jobs: Sequence[Job], cache: str) -> list[tuple[Job, list[int] | str]]:
    process = subprocess.run(
        [*_WORKER, "compile"], env=_environment(cache), input=json.dumps(jobs), capture_output=True, text=True
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('["')]
    results: list[tuple[Job, list[int] | str]] = [(Job(*line[:3]), line[3]) for line in lines]
    if process.returncode:
        why = (process.stderr.strip().splitlines() or [""])[-1]
        results += [
            (job, f"the compiler exited with {process.returncode} here or before: {why}")
            for job in jobs[len(results) :]
        ]
    return results


def _merged(table: dict[str, Any], current: dict[str, Any], results: dict[Job, list[int] | str]) -> dict[str, Any]:
    """The table of the current variants, from the old one and new results. Failures stay out."""
    kernels: dict[str, Any] = {}
    for job in _jobs(current):
        result = results.get(job) or _recorded(table, current, job)
        if isinstance(result, list):
            entry = kernels.setdefault(job.kernel, {"source": current["kernels"][job.kernel]["source"], "variants": {}})
            entry["variants"].setdefault(job.variant, {})[job.target] = result
    return {"triton": current["triton"], "columns": ["registers", "spills", "shared"], "kernels": kernels}


def _differences(
    table: dict[str, Any],
    current: dict[str, Any],
    stale: Sequence[Job],
    sample: Sequence[Job],
    results: dict[Job, list[int] | str],
) -> Iterator[str]:
    remedy = "run python -m srv_kernels.triton.compile, and commit the table"
    if stale:
        kernels = ", ".join(sorted({job.kernel for job in stale}))
        yield f"{TABLE.name} has no results of the current source of {kernels}: {remedy}"
    jobs = set(_jobs(current))
    recorded = {
        Job(kernel, variant, target)
        for kernel, entry in table.get("kernels", {}).items()
        for variant, targets in entry["variants"].items()
        for target in targets
    }
    if gone := sorted(recorded - jobs):
        yield f"{TABLE.name} has {_text(gone[0])}, which is not compiled any more: {remedy}"
    for job in sample:
        if isinstance(results[job], list) and results[job] != (in_table := _recorded(table, current, job)):
            yield f"{_text(job)}: {results[job]}, but {in_table} in {TABLE.name}: {remedy}"


def _text(job: Job) -> str:
    return f"{job.kernel} [{job.variant}] for {job.target}"


def _formatted(table: dict[str, Any]) -> str:
    """JSON with one line per variant."""
    lines = [f'{{"triton": {json.dumps(table["triton"])}, "columns": {json.dumps(table["columns"])}, "kernels": {{']
    for index, (kernel, entry) in enumerate(table["kernels"].items()):
        lines.append(f' {json.dumps(kernel)}: {{"source": {json.dumps(entry["source"])}, "variants": {{')
        rows = [f"  {json.dumps(label)}: {json.dumps(targets)}" for label, targets in entry["variants"].items()]
        lines.append(",\n".join(rows))
        lines.append(" }}" + ("," if index < len(table["kernels"]) - 1 else ""))
    return "\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    sys.exit(main())
