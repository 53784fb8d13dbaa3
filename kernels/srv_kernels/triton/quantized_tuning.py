"""Block sizes of the kernels for quantized weights and for sampling, by target.

Data only. "gpu" is the row of every target that has none of its own: nothing here has been measured on hardware yet,
and the entries to measure first are named where they stand. "interpreter": few programs and large blocks, since
Triton's interpreter takes about 30 µs per operation, whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from srv_kernels.triton.registration import INTERPRETED

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class GemmBlocks:
    """A tile of x [block_m, block_k] times one of the weight [block_n, block_k]. `up_to`: the rows of x it is for."""

    up_to: int
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GemvBlocks:
    """block_positions: positions per step, of which each holds one weight per plane (see `gguf_blocks`).

    results: outputs times rows of one program. The positions are the same for every number of rows, so that a row's
    sum does not depend on the others.
    """

    results: int
    block_positions: int
    warps: int


@dataclass(frozen=True, slots=True)
class VectorBlocks:
    """Elements per step of a kernel that reads rows, and the rows of one program."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class DrawBlocks:
    """As `VectorBlocks`; `pivots`: bounds per pass of a search, each of which costs five instructions per token.

    A search needs log(2³²) / log(pivots + 1) passes: 32, 21, 14 or 11 for 1, 2, 4 or 8 pivots.
    """

    rows: int
    block: int
    pivots: int
    warps: int


_LARGEST = 1 << 62

# int8 x int8 and float x int8. Up to 16 rows the weight's bytes set the time, and rows are padded to one matrix
# instruction. To measure: block_k of the first entry, and warps of the last.
INT8_GEMM: Mapping[str, tuple[GemmBlocks, ...]] = {
    "gpu": (
        GemmBlocks(up_to=16, block_m=16, block_n=32, block_k=128, warps=4, stages=4),
        GemmBlocks(up_to=64, block_m=64, block_n=64, block_k=64, warps=4, stages=3),
        GemmBlocks(up_to=_LARGEST, block_m=128, block_n=128, block_k=64, warps=8, stages=3),
    ),
    "interpreter": (
        GemmBlocks(up_to=16, block_m=16, block_n=64, block_k=512, warps=1, stages=1),
        GemmBlocks(up_to=_LARGEST, block_m=64, block_n=128, block_k=256, warps=1, stages=1),
    ),
}

# float32 x, which only tests and old GPUs have: it is multiplied exactly, without matrix instructions.
INT8_GEMM_FLOAT32: Mapping[str, tuple[GemmBlocks, ...]] = {
    "gpu": (
        GemmBlocks(up_to=16, block_m=16, block_n=32, block_k=64, warps=4, stages=2),
        GemmBlocks(up_to=_LARGEST, block_m=64, block_n=64, block_k=32, warps=4, stages=2),
    ),
    "interpreter": INT8_GEMM["interpreter"],
}

# block_k: positions, a multiple of 16, of which each holds up to four weights. Dequantized tiles live in registers, so
# blocks are smaller than those of int8.
GGUF_GEMM: Mapping[str, tuple[GemmBlocks, ...]] = {
    "gpu": (
        GemmBlocks(up_to=16, block_m=16, block_n=32, block_k=64, warps=4, stages=2),
        GemmBlocks(up_to=64, block_m=64, block_n=64, block_k=32, warps=4, stages=2),
        GemmBlocks(up_to=_LARGEST, block_m=128, block_n=64, block_k=32, warps=8, stages=2),
    ),
    "interpreter": (GemmBlocks(up_to=_LARGEST, block_m=64, block_n=64, block_k=128, warps=1, stages=1),),
}

# To measure: results, where less means more programs, which hide latency, and more means fewer reads of x.
GGUF_GEMV: Mapping[str, GemvBlocks] = {
    "gpu": GemvBlocks(results=8, block_positions=512, warps=4),
    "interpreter": GemvBlocks(results=256, block_positions=256, warps=1),
}
GEMV_ROWS = (1, 2, 4, 8)  # numbers of rows that the GEMV is compiled for

# The embedding lookup; block: positions.
GGUF_ROWS: Mapping[str, VectorBlocks] = {
    "gpu": VectorBlocks(rows=1, block=512, warps=4),
    "interpreter": VectorBlocks(rows=8, block=256, warps=1),
}

QUANTIZE: Mapping[str, VectorBlocks] = {
    "gpu": VectorBlocks(rows=1, block=4096, warps=8),
    "interpreter": VectorBlocks(rows=32, block=1024, warps=1),
}

MOST_LIKELY: Mapping[str, VectorBlocks] = {
    "gpu": VectorBlocks(rows=1, block=8192, warps=16),
    "interpreter": VectorBlocks(rows=256, block=1024, warps=1),
}

# To measure: pivots, and warps.
DRAW: Mapping[str, DrawBlocks] = {
    "gpu": DrawBlocks(rows=1, block=4096, pivots=4, warps=16),
    "interpreter": DrawBlocks(rows=256, block=1024, pivots=8, warps=1),
}


@lru_cache(maxsize=1)
def target() -> str:
    """The name of this process's target: "sm90", "gfx942", ...; "interpreter" in Triton's interpreter."""
    if INTERPRETED:
        return "interpreter"
    from triton.runtime import driver

    found = driver.active.get_current_target()
    return f"sm{found.arch}" if found.backend == "cuda" else str(found.arch)


def of_target(table: Mapping[str, Entry]) -> Entry:
    """This target's entry of a table."""
    return table.get(target(), table["gpu"])


def for_rows(table: Mapping[str, tuple[GemmBlocks, ...]], rows: int) -> GemmBlocks:
    """The blocks of a GEMM with this many rows."""
    return next(blocks for blocks in of_target(table) if rows <= blocks.up_to)


def gemv_rows(rows: int) -> int | None:
    """The number of rows of the GEMV that takes `rows`; None if they are too many."""
    return next((count for count in GEMV_ROWS if rows <= count), None)
