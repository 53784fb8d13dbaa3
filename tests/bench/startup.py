"""The time of commands that an operator waits for, in empty Python starts: `args list`, `launch --help`, `plan`.

    python tests/bench/startup.py [--rounds 15] [--json FILE]

Figures are medians of the processor time (user and system) of whole processes that run in turns; bytecode is compiled
before. `plan` resolves for absent hardware, with the demo model if it is installed. Goal: at most ten empty starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

GOAL = 10
EMPTY = "an empty start"
SRV = str(Path(sys.executable).parent / "srv")
COMMANDS: dict[str, Sequence[str]] = {
    EMPTY: (sys.executable, "-c", "pass"),
    "srv args list": (SRV, "args", "list"),
    "srv launch --help": (SRV, "launch", "--help"),
    "srv plan --device npu:a3": (SRV, "plan", "--device", "npu:a3"),
    "srv plan --device cuda:sm90": (SRV, "plan", "--device", "cuda:sm90"),
    "srv plan --device cpu:avx512": (SRV, "plan", "--device", "cpu:avx512"),
}


def processor_seconds(command: Sequence[str]) -> float:
    """User and system time of one run."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, float]:
    """Median milliseconds by command; a first round, which is not counted, writes the bytecode."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            seconds = processor_seconds(command)
            if number:
                times[name].append(seconds * 1e3)
    return {name: statistics.median(time) for name, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    medians = measure(options.rounds)
    table = Table("command", "ms", "empty starts", f"at most {GOAL}")
    for name, milliseconds in medians.items():
        ratio = milliseconds / medians[EMPTY]
        table.add_row(name, f"{milliseconds:.1f}", f"{ratio:.1f}", "yes" if ratio <= GOAL else "no")
    Console().print(table)
    if options.json is not None:
        report = {
            name: {"ms": round(ms, 2), "empty_starts": round(ms / medians[EMPTY], 2)} for name, ms in medians.items()
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
