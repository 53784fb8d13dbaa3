"""Read the figures that `race.py` wrote: which peers ran, the throughput of each, and its share of the floor.

Must not know the pages and plots that are made of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import floors
from bench_loads import Workload
from machine import Ceilings, machine_kind

OURS = "srv"

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def best(ceilings: Sequence[Mapping[str, float | None]]) -> dict[str, float | None] | None:
    """The highest of several measurements of each ceiling; None without measurements."""
    if not ceilings:
        return None
    seen = {name: [ceiling[name] for ceiling in ceilings] for name in ceilings[0]}
    return {name: max((value for value in values if value is not None), default=None) for name, values in seen.items()}


def kind_of(report: Report) -> str:
    """The kind of the machine: avx512, avx2, ..."""
    return machine_kind(report["machine"]["instructions"])


def workloads_of(report: Report) -> list[Workload]:
    return [Workload(**workload) for workload in report["points"]]


def finished_servers(report: Report) -> list[Row]:
    """The servers that finished a load, including those of this project."""
    return [peer for peer in report["peers"] if peer["points"]]


def ours_of(report: Report) -> Row | None:
    """This project's server with its default settings."""
    return next((peer for peer in finished_servers(report) if peer["name"] == OURS), None)


def value_of(peer: Row | None, workload: Workload, key: str) -> float | None:
    """A peer's figure for a load; None if it has none."""
    result = peer["points"].get(workload.name) if peer else None
    return None if result is None else float(result[key])


def shape_of(report: Report, peer: Row) -> floors.Shape:
    """The model's sizes, with the bytes that a peer reads."""
    shape = floors.Shape(**report["shape"])
    kv_item_bytes = peer["kv_item_bytes"] or shape.kv_item_bytes
    return replace(shape, weight_bytes=peer["weight_bytes"] or 0, kv_item_bytes=kv_item_bytes)


def share(report: Report, peer: Row, workload: Workload) -> float | None:
    """The time of the floor divided by the measured time: 1 is the maximum on this machine."""
    tokens = value_of(peer, workload, "tokens_s")
    if tokens is None or not peer["weight_bytes"] or not report["ceilings"]:
        return None
    floor = floors.seconds(shape_of(report, peer), workload, Ceilings(**report["ceilings"]), peer["arithmetic"])
    return None if floor is None else floor * tokens / workload.counted
