"""tuning.json: the block sizes of the kernels, by table and target. Imports neither Triton nor torch.

    {"attention": {"sm90": {"extend 256": [64, 32, 8, 5]}, ...},
     "int8_gemm": {"gpu": [[16, 16, 32, 128, 4, 4], ...]}, ...}

`attention_tuning` and `quantized_tuning` say what the numbers are, and which row a target without one of its own takes.
`srv_kernels.triton.tune` measures rows on a GPU and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tuning.json")

Tables = dict[str, dict[str, Any]]


def read(path: Path = PATH) -> Tables:
    """Rows by table and target."""
    tables: Tables = json.loads(path.read_text(encoding="utf-8"))
    return tables


def formatted(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with one line per row."""
    parts = []
    for name, table in tables.items():
        rows = ",\n".join(f"  {json.dumps(target)}: {json.dumps(row)}" for target, row in table.items())
        parts.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


TABLES = read()
