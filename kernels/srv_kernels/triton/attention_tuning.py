"""Block sizes of paged attention, per target: the rows "attention" of tuning.json.

A target has its name in `targets` ("sm90", "gfx942"), or is "xpu". What a target lacks is that of its family ("sm",
"gfx"), and what this lacks is that of "". The sizes follow from registers and shared memory of the compiled code, with
few spills or none; except on gfx1100, with too few registers for heads of 128 elements and more, and for prompts
on sm120 and over int8 pools on gfx942. No GPU has measured them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from srv_kernels.triton.tuning_data import TABLES

Phase = Literal["extend", "decode"]


def key(name: str) -> tuple[Phase, int]:
    """A key of tuning.json, "extend 128", as phase and head dim."""
    phase, _, dim = name.partition(" ")
    return ("extend" if phase == "extend" else "decode"), int(dim)


class Blocks(NamedTuple):
    """Sizes of one kernel. `rows`: query tokens times heads in a tile, at most (decode takes fewer if it can).

    `keys`: tokens per step of the loop over keys. `warps`, `stages`: launch options of Triton. The loop looks up pages
    before it can load keys, so NVIDIA's pipeline has one buffer of keys for 3 stages, two for 5, and three for 7.
    """

    rows: int
    keys: int
    warps: int
    stages: int


MOST_SPLITS = 64
"""The most parts into which a row's keys are divided, unless the caller has a limit of its own."""

PROGRAMS = 2
"""How many programs a compute unit should get."""

SPLIT_TOKENS = 128
"""A split has at least this many tokens: fewer do not pay for the reduction. It matters for few rows; with 16 or more,
the number of programs decides.
"""

# By phase and head dim (of keys or values, the larger; as a power of two), for queries of 2 bytes per element.
BLOCKS: Mapping[str, Mapping[tuple[Phase, int], Blocks]] = {
    target: {key(name): Blocks(*sizes) for name, sizes in rows.items()} for target, rows in TABLES["attention"].items()
}


def blocks(target: str, phase: Phase, dim: int, item_size: int) -> Blocks:
    """The block sizes for heads of `dim` elements, where queries have `item_size` bytes per element.

    Raises ValueError for heads of more than 256 elements.
    """
    width = next((limit for limit in (64, 128, 256) if dim <= limit), None)
    if width is None:
        raise ValueError(f"paged attention has no block sizes for heads of {dim} elements; at most 256 are supported")
    tables = (BLOCKS.get(name, {}) for name in _names(target))
    sizes = next(table[phase, width] for table in tables if (phase, width) in table)
    if item_size <= 2:
        return sizes
    # Products of float32 are computed without tensor cores, in registers.
    return sizes._replace(rows=max(16, sizes.rows // 4), keys=max(16, sizes.keys // 4))


def _names(target: str) -> tuple[str, str, str]:
    return target, re.sub(r"\d.*", "", target), ""
