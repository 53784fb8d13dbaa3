"""Measures block sizes on the GPU of this machine, and writes the best into tuning.json.

    python -m srv_kernels.triton.tune --target sm90            print what it would change
    python -m srv_kernels.triton.tune --target sm90 --write    write it

A target's row begins as that which it uses now. A candidate replaces the present sizes if it is faster by more than
3 %, so that noise changes nothing. Afterwards, run `python -m srv_kernels.triton.compile`, whose table has the block
sizes of every target, and commit both.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from srv_kernels.triton import tuning_data
from srv_kernels.triton.attention_tuning import blocks, key
from srv_kernels.triton.targets import BY_NAME, Target
from srv_kernels.triton.tune_candidates import Limits, Place, Sizes, candidates, places, unfit

COMPILED = Path(__file__).with_name("compiled.json")
_GAIN = 0.97  # of the present time, which a candidate must not exceed

Timer = Callable[[Place, Sizes], float]
"""The seconds of the workloads of a place with these sizes; raises an exception for sizes that do not run."""


class Change(NamedTuple):
    """New sizes of a place, with seconds before and after."""

    place: Place
    before: Sizes
    after: Sizes
    seconds: tuple[float, float]

    def __str__(self) -> str:
        old, new = (f"{second * 1e6:.1f} µs" for second in self.seconds)
        return f"{self.place.table} {self.place.key}: {list(self.before)} ({old}) -> {list(self.after)} ({new})"


def limits_of(target: Target) -> Limits:
    """What limits the candidates of a target."""
    stages = (2, 3, 5, 7) if target.backend == "cuda" else (2,)
    return Limits(target.name, target.shared, target.threads_per_warp, stages)


def present_sizes(tables: tuning_data.Tables, place: Place, target: str) -> Sizes:
    """The sizes that a target uses now; of a GEMM's tile, without the rows that it is for."""
    if place.table == "attention":
        phase, dim = key(str(place.key))
        return tuple(tables["attention"].get(target, {}).get(place.key) or blocks(target, phase, dim, 2))
    row = tables[place.table].get(target, tables[place.table]["gpu"])
    return tuple(row) if place.table == "gguf_gemv" else tuple(row[int(place.key)][1:])


def tune(
    tables: tuning_data.Tables, target: Target, timer: Timer, record: dict[str, Any], log: Callable[[str], None] = print
) -> tuple[tuning_data.Tables, list[Change]]:
    """New tables, and what has changed. `tables` stay as they are."""
    new_tables, changes, limits = copy.deepcopy(tables), [], limits_of(target)
    for place in places(tables, target.name):
        present = present_sizes(tables, place, target.name)
        best = present
        first = seconds = _timed(timer, place, present, log)
        for sizes in candidates(place, present, limits)[1:]:
            if unfit(place, sizes, limits, record) is not None:
                continue
            time = _timed(timer, place, sizes, log)
            if time < min(seconds, first * _GAIN):
                best, seconds = sizes, time
        if best != present:
            changes.append(Change(place, present, best, (first, seconds)))
            _set(new_tables, place, target.name, best)
    return new_tables, changes


def _timed(timer: Timer, place: Place, sizes: Sizes, log: Callable[[str], None]) -> float:
    """The seconds of a launch with these sizes; infinite, and logged, if the device cannot run it."""
    try:
        return timer(place, sizes)
    except Exception as error:  # noqa: BLE001  a compiler or driver refuses sizes in many ways
        log(f"{place.table} {place.key} {list(sizes)}: {type(error).__name__}: {error}")
        return math.inf


def _set(tables: tuning_data.Tables, place: Place, target: str, sizes: Sizes) -> None:
    table = tables[place.table]
    if place.table == "attention":
        table.setdefault(target, {})[str(place.key)] = list(sizes)
    elif place.table == "gguf_gemv":
        table[target] = list(sizes)
    else:
        row = table.setdefault(target, copy.deepcopy(table["gpu"]))
        row[int(place.key)][1:] = sizes


def main(
    arguments: Sequence[str] | None = None,
    make_timer: Callable[[Target], Timer] | None = None,
    path: Path | None = None,
) -> int:
    """Exit status 0 if it has measured. `make_timer` and `path` replace the GPU of this machine and tuning.json."""
    options = _parser().parse_args(arguments)
    target = BY_NAME[options.target]
    if make_timer is None:
        from srv_kernels.triton import tune_workloads

        if refusal := tune_workloads.why_not(target):
            print(refusal, file=sys.stderr)
            return 1
        make_timer = tune_workloads.timer
    record = json.loads(COMPILED.read_text(encoding="utf-8"))
    file = path or tuning_data.PATH
    tables, changes = tune(tuning_data.read(file), target, make_timer(target), record)
    for change in changes:
        print(change)
    print(f"{len(changes)} rows of {target.name} change")
    if options.write:
        file.write_text(tuning_data.formatted(tables), encoding="utf-8")
        print(f"{file.name} is written: run python -m srv_kernels.triton.compile, and commit both tables")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m srv_kernels.triton.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=sorted(BY_NAME), required=True, help="what the GPU of this machine is")
    parser.add_argument("--write", action="store_true", help="write tuning.json; otherwise only print the changes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
