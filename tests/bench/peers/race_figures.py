"""What the figures of a race say, as `race.py` wrote them: who ran, what each reached, and what share of its floor.

Must not know what is made of it, pages or plots.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import floors
from bench_loads import Point
from machine import Ceilings, machine_kind

OURS = "srv"

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def best(found: Sequence[Mapping[str, float | None]]) -> dict[str, float | None] | None:
    """The highest of several measurements of each ceiling; None where there are none."""
    if not found:
        return None
    seen = {name: [each[name] for each in found] for name in found[0]}
    return {name: max((value for value in values if value is not None), default=None) for name, values in seen.items()}


def kind_of(report: Report) -> str:
    """Of the machine: avx512, avx2, ..."""
    return machine_kind(report["machine"]["instructions"])


def points_of(report: Report) -> list[Point]:
    return [Point(**point) for point in report["points"]]


def ran(report: Report) -> list[Row]:
    """Those that finished a load, this project's servers among them."""
    return [peer for peer in report["peers"] if peer["points"]]


def ours_of(report: Report) -> Row | None:
    """This project's server as it is by default."""
    return next((peer for peer in ran(report) if peer["name"] == OURS), None)


def value_of(peer: Row | None, point: Point, key: str) -> float | None:
    """A peer's figure at a load; None where it has none."""
    result = peer["points"].get(point.name) if peer else None
    return None if result is None else float(result[key])


def shape_of(report: Report, peer: Row) -> floors.Shape:
    """What is raced, in the bytes that a peer reads."""
    shape = floors.Shape(**report["shape"])
    kept = peer["kv_item_bytes"] or shape.kv_item_bytes
    return replace(shape, weight_bytes=peer["weight_bytes"] or 0, kv_item_bytes=kept)


def share(report: Report, peer: Row, point: Point) -> float | None:
    """The floor's time divided by the time that was measured: 1 is the most that this machine allows."""
    tokens = value_of(peer, point, "tokens_s")
    if tokens is None or not peer["weight_bytes"] or not report["ceilings"]:
        return None
    floor = floors.seconds(shape_of(report, peer), point, Ceilings(**report["ceilings"]), peer["arithmetic"])
    return None if floor is None else floor * tokens / point.counted
