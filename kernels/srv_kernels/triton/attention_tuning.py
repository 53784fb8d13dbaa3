"""Block sizes of paged attention, per target; data that a tuner may rewrite.

A target is named as `target_name` does: "cuda:90", "hip:gfx942", "xpu". What a target lacks follows from its family
("cuda", "hip", "xpu"), and what that lacks from "".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["extend", "decode"]


class Blocks(NamedTuple):
    """Sizes of one kernel. `rows`: query tokens times heads in a tile, at most (decode takes fewer if it can).

    `keys`: tokens per step of the loop over keys. `warps`, `stages`: launch options of Triton.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Limits:
    """`splits`: the most parts into which a row's keys are divided. `programs`: how many a compute unit should get."""

    splits: int
    programs: int


LIMITS: dict[str, Limits] = {
    "": Limits(splits=64, programs=2),
    "hip": Limits(splits=16, programs=2),
}

SPLIT_TOKENS = 256
"""A split has at least this many tokens: fewer do not pay for the reduction."""

# By phase and head dim (of keys or values, the larger; as a power of two), for elements of 2 bytes.
BLOCKS: dict[str, dict[tuple[Phase, int], Blocks]] = {
    "": {
        ("extend", 64): Blocks(128, 64, 4, 2),
        ("extend", 128): Blocks(64, 64, 4, 2),
        ("extend", 256): Blocks(64, 32, 4, 2),
        ("decode", 64): Blocks(64, 64, 4, 3),
        ("decode", 128): Blocks(64, 64, 4, 2),
        ("decode", 256): Blocks(32, 32, 4, 2),
    },
}


def blocks(target: str, phase: Phase, dim: int, item_size: int) -> Blocks:
    """The block sizes for heads of `dim` elements, where queries have `item_size` bytes per element.

    Raises ValueError for heads of more than 256 elements.
    """
    width = next((each for each in (64, 128, 256) if dim <= each), None)
    if width is None:
        raise ValueError(f"paged attention has no block sizes for heads of {dim} elements; at most 256 are supported")
    found = next(table[phase, width] for name in _names(target) if (table := BLOCKS.get(name)) and (phase, width) in table)
    if item_size <= 2:
        return found
    return found._replace(rows=max(16, found.rows // 2), keys=max(16, found.keys // 2))


def limits(target: str) -> Limits:
    """See `Limits`."""
    return next(LIMITS[name] for name in _names(target) if name in LIMITS)


def _names(target: str) -> tuple[str, str, str]:
    return target, target.partition(":")[0], ""
