"""The matrix for programs: JSON, where equal cells of several variants share one entry, and CSV, a line a cell."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from srv.args.config import ARGUMENTS
from srv_matrix.matrix import Matrix
from srv_matrix.pages import options
from srv_matrix.records import LEVELS, Evidence, Kind, Record

COLUMNS = (
    "feature", "kind", "platform", "variant", "status", "declared", "core", "level",
    "reason_code", "requires", "since", "declared_by", "reason",
)  # fmt: skip


def to_dict(matrix: Matrix) -> dict[str, Any]:
    """Arguments with their cells, and what is needed to read them."""
    cells: dict[str, list[Record]] = {}
    for record in matrix.records.values():
        cells.setdefault(record.argument, []).append(record)
    return {
        "about": "Made by `srv matrix generate`. status is the lower of declared (the platform) and core.",
        "levels": {level.name: meaning for level, meaning in LEVELS.items()},
        "platforms": {
            each.name: {"variants": list(each.variants), "summary": each.summary} for each in matrix.manifests
        },
        "features": _features(matrix),
        "arguments": [_argument(name, cells.get(name, ())) for name in ARGUMENTS],
    }


def _features(matrix: Matrix) -> list[dict[str, Any]]:
    """What is no argument: kind, name and cells of each."""
    kinds: tuple[Kind, ...] = ("model", "endpoint", "op", "pair")
    return [
        {"kind": kind, "name": feature.partition(":")[2], "cells": _grouped(records)}
        for kind in kinds
        for feature, records in matrix.of_kind(kind).items()
    ]


def to_json(matrix: Matrix) -> str:
    """One argument or feature a line, so that a change shows as the lines that changed."""
    told = to_dict(matrix)
    features, arguments = _lines(told.pop("features")), _lines(told.pop("arguments"))
    head = json.dumps(told, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "features": [{features}],\n "arguments": [{arguments}]}}\n'


def _lines(entries: list[dict[str, Any]]) -> str:
    lines = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in entries]
    return "\n" + ",\n".join(lines) + "\n" if lines else ""


def to_csv(matrix: Matrix) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in matrix.records.values():
        told = cell(record) | {"feature": record.feature, "platform": record.platform, "variant": record.variant}
        writer.writerow([told.get(column, "") for column in COLUMNS])
    return out.getvalue()


def cell(record: Record) -> dict[str, Any]:
    """What one cell says, without its place; empty fields are left out."""
    told: dict[str, Any] = {
        "kind": record.kind,
        "status": record.status.value,
        "declared": record.declared.value,
        "core": record.core.value,
        "level": record.level.name if record.level is not None else "",
        "reason_code": record.reason_code,
        "reason": record.reason,
        "requires": record.requires,
        "since": record.since,
        "declared_by": record.declared_by,
        "default": record.default,
        "evidence": [_evidence(each) for each in record.evidence],
    }
    return {name: value for name, value in told.items() if value}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {name: value for name, value in asdict(evidence).items() if value} | {"level": evidence.level.name}


def _argument(name: str, records: Iterable[Record]) -> dict[str, Any]:
    argument = ARGUMENTS[name]
    return {
        "name": name,
        "group": argument.group,
        "flags": list(argument.flags),
        "help": argument.arg.help,
        "default": argument.show(argument.default),
        "options": options(argument),
        "cells": _grouped(record for record in records if record.kind == "arg"),
        "values": _values(records),
    }


def _values(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    by_value: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "value":
            by_value.setdefault(record.feature.partition("=")[2], []).append(record)
    return {value: _grouped(found) for value, found in by_value.items()}


def _grouped(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Cells that say the same, once, with all their places ("npu:a3")."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        told = cell(record)
        told.pop("kind")
        told.pop("declared_by", None)  # its place says who
        entry = found.setdefault(json.dumps(told), {"on": [], **told})
        entry["on"].append(f"{record.platform}:{record.variant}")
    return list(found.values())
