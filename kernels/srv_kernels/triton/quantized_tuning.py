"""Block sizes of the kernels for linear layers and for sampling, by target.

The rows of tuning.json, typed. "gpu" is the row of every target that has none of its own. No GPU has measured them
yet, and the entries to measure first are named where they stand. "interpreter": few programs and large blocks, since
Triton's interpreter takes about 30 µs per operation, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from srv_kernels.triton.registration import INTERPRETED
from srv_kernels.triton.targets import BY_NAME
from srv_kernels.triton.tuning_data import TABLES

Entry = TypeVar("Entry")
Choice = TypeVar("Choice")


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


def _gemm(name: str) -> Mapping[str, tuple[GemmBlocks, ...]]:
    """A table of GEMM tiles; the last of a row is for any number of rows of x."""
    return {
        target: tuple(GemmBlocks(_LARGEST if up_to is None else up_to, *sizes) for up_to, *sizes in row)
        for target, row in TABLES[name].items()
    }


# int8 x int8 and float x int8. Up to 16 rows the weight's bytes set the time, and rows are padded to one matrix
# instruction. To measure: block_k of the first entry, and warps of the last.
INT8_GEMM = _gemm("int8_gemm")

# float32 x, which only tests and old GPUs have: it is multiplied exactly, without matrix instructions.
INT8_GEMM_FLOAT32 = _gemm("int8_gemm_float32")

# e4m3 x e4m3, for many rows. block_k: at most 128, so that a tile lies within a block of the usual checkpoints. To
# measure: block_n and stages, first of all on sm90.
FP8_GEMM = _gemm("fp8_gemm")

# 16-bit x and weight, for the logits of few rows. To measure: block_k and stages of the first entry.
DENSE_GEMM = _gemm("dense_gemm")

# block_k: positions, a multiple of 16, of which each holds up to four weights. Dequantized tiles live in registers, so
# blocks are smaller than those of int8.
GGUF_GEMM = _gemm("gguf_gemm")

# Experts; up_to: the mean of an expert's rows, which are padded to block_m. block_k is the same for every number of
# rows, so that a row's sums do not depend on the others. Two tiles of the weight, gate and up, share one of x.
MOE_GEMM = _gemm("moe_gemm")
MOE_GEMM_FLOAT32 = _gemm("moe_gemm_float32")
MOE_GGUF = _gemm("moe_gguf")

# To measure: results, where less means more programs, which hide latency, and more means fewer reads of x.
GGUF_GEMV: Mapping[str, GemvBlocks] = {target: GemvBlocks(*row) for target, row in TABLES["gguf_gemv"].items()}
GEMV_ROWS = (1, 2, 4, 8)  # numbers of rows that the GEMV is compiled for


def _vectors(name: str) -> Mapping[str, VectorBlocks]:
    return {target: VectorBlocks(*row) for target, row in TABLES[name].items()}


GGUF_ROWS = _vectors("gguf_rows")  # the embedding lookup; block: positions
QUANTIZE = _vectors("quantize")
MOST_LIKELY = _vectors("most_likely")

# To measure: pivots, and warps.
DRAW: Mapping[str, DrawBlocks] = {target: DrawBlocks(*row) for target, row in TABLES["draw"].items()}


@lru_cache(maxsize=1)
def target() -> str:
    """The name of this process's target: "sm90", "gfx942", ...; "interpreter" in Triton's interpreter."""
    if INTERPRETED:
        return "interpreter"
    from triton.runtime import driver

    present = driver.active.get_current_target()
    return f"sm{present.arch}" if present.backend == "cuda" else str(present.arch)


def of_target(table: Mapping[str, Entry]) -> Entry:
    """This target's entry of a table."""
    return table.get(target(), table["gpu"])


def for_rows(table: Mapping[str, tuple[GemmBlocks, ...]], rows: int) -> GemmBlocks:
    """The blocks of a GEMM with this many rows."""
    return next(blocks for blocks in of_target(table) if rows <= blocks.up_to)


def compiled_for(
    table: Mapping[str, Entry], pick: Callable[[Entry], Sequence[Choice]]
) -> Iterator[tuple[Choice, frozenset[str]]]:
    """What `pick` chooses of each compiled target's entry, once each, with the targets that have it; none for all."""
    by_choice: dict[Choice, set[str]] = {}
    for name in BY_NAME:
        for choice in pick(table.get(name, table["gpu"])):
            by_choice.setdefault(choice, set()).add(name)
    for choice, targets in by_choice.items():
        yield choice, frozenset() if len(targets) == len(BY_NAME) else frozenset(targets)


def all_tiles(entry: tuple[GemmBlocks, ...]) -> Sequence[GemmBlocks]:
    """The distinct tiles of a GEMM, whatever the rows of x that they are for."""
    return [replace(blocks, up_to=_LARGEST) for blocks in entry]


def gemv_rows(rows: int) -> int | None:
    """The number of rows of the GEMV that takes `rows`; None if they are too many."""
    return next((count for count in GEMV_ROWS if rows <= count), None)
