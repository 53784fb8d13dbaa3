"""Block sizes that a tuner may try: the candidates of each row of tuning.json, and which of them fit a target.

    attention    a phase and a head dim ("extend 128"): rows, keys, warps, stages
    GEMM         a tile per range of rows of x; the ranges stay as they are
    GEMV         results, positions, warps

A candidate fits if its tiles fit into shared memory and registers by their sizes, and if the committed table of
compilations (`compiled.json`) has no spills of it. Imports neither Triton nor torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Sizes = tuple[int, ...]
Record = Mapping[str, Any]  # the content of compiled.json

_REGISTERS = 255  # per thread, of NVIDIA; AMD's matrix cores have as many again for sums
_SPARE = 48  # registers per thread for addresses and masks
_ITEM = 2  # bytes per element of queries, keys and activations
GEMM_TABLES = ("int8_gemm", "int8_gemm_float32", "dense_gemm", "gguf_gemm")
_KERNELS = {
    **{"extend": "attention_variants.extend_kernel", "decode": "attention_variants.decode_kernel"},
    **{"int8_gemm": "int8_linear.int8_gemm_kernel", "int8_gemm_float32": "int8_linear.int8_gemm_kernel"},
    **{"dense_gemm": "dense_linear.dense_gemm_kernel"},
    **{"gguf_gemm": "gguf_linear.gguf_gemm_kernel", "gguf_gemv": "gguf_linear.gguf_gemv_kernel"},
}
_GROUP = 16  # positions per group of GGUF blocks


class Limits(NamedTuple):
    """Of a target. shared: bytes per program. threads: per warp. stages: those that its pipelines may have."""

    name: str
    shared: int
    threads: int
    stages: Sequence[int]


class Place(NamedTuple):
    """What is tuned: a table; the key of an attention row ("extend 128"), or the index of a tile in a GEMM's row."""

    table: str
    key: str | int


def places(tables: Mapping[str, Mapping[str, Any]], target: str) -> Iterator[Place]:
    """Everything that is tuned for a target."""
    yield from (Place("attention", f"{phase} {dim}") for phase in ("extend", "decode") for dim in (64, 128, 256))
    for name in GEMM_TABLES:
        row = tables[name].get(target, tables[name]["gpu"])
        yield from (Place(name, index) for index in range(len(row)))
    yield Place("gguf_gemv", 0)


def candidates(place: Place, present: Sizes, limits: Limits) -> list[Sizes]:
    """The present sizes, then all others, unfiltered. Of a GEMM's tile, they lack the rows that it is for."""
    if place.table == "attention":
        rows = (64, 128) if str(place.key).startswith("extend") else (32, 64)
        others = itertools.product(rows, (16, 32, 64, 128), (4, 8), limits.stages)
    elif place.table == "gguf_gemv":
        others = itertools.product((8, 16, 32), (256, 512, 1024), (2, 4, 8))
    else:
        depths = (32, 64, 128, 256) if place.table == "int8_gemm" else (16, 32, 64, 128)
        rows = (16,) if present[0] == 16 else (32, 64, 128)
        others = itertools.product(rows, (16, 32, 64, 128), depths, (4, 8), (2, 3, 4))
    return list(dict.fromkeys([present, *others]))


def unfit(place: Place, sizes: Sizes, limits: Limits, record: Record) -> str | None:
    """Why a candidate is not tried on a target; None if it fits."""
    shared, registers = _needs(place, sizes, limits)
    if shared > limits.shared:
        return f"about {shared} bytes of shared memory, more than the {limits.shared} of {limits.name}"
    if registers > _REGISTERS * (1 if limits.name.startswith("sm") else 2):
        return f"about {registers} registers per thread"
    for result in recorded(place, sizes, limits.name, record):
        if result[1]:
            return f"compiled, it spills {result[1]}"
        if result[2] > limits.shared:
            return f"compiled, it needs {result[2]} bytes of shared memory"
    return None


def kernel_of(place: Place) -> str:
    """The kernel whose sizes a place has, as compiled.json names it: the module of its variants, and the function."""
    return _KERNELS[str(place.key).split()[0] if place.table == "attention" else place.table]


def recorded(place: Place, sizes: Sizes, target: str, record: Record) -> list[Sequence[int]]:
    """Registers, spills and bytes of shared memory of the compilations with these sizes."""
    words = _words(place, sizes)
    kernel = kernel_of(place)
    variants = record.get("kernels", {}).get(kernel, {}).get("variants", {})
    return [
        results[target]
        for label, results in variants.items()
        if target in results and words.items() <= dict(re.findall(r"(\w+)=(\w+)", label)).items()
    ]


def _words(place: Place, sizes: Sizes) -> dict[str, str]:
    """What the label of a compilation has."""
    if place.table == "attention":
        rows, keys, warps, stages = sizes
        width = str(place.key).split()[1]
        words = {"BLOCK_KEYS": keys, "BLOCK_KEY": width, "warps": warps, "stages": stages}
        if str(place.key).startswith("extend"):  # decode takes as few rows as it needs
            words["BLOCK_ROWS"] = rows
    elif place.table == "gguf_gemv":
        results, positions, warps = sizes
        words = {"ROWS": 1, "BLOCK_N": results, "BLOCK_G": positions // _GROUP, "warps": warps}
    else:
        block_m, block_n, block_k, warps, stages = sizes
        depth = {"BLOCK_G": block_k // _GROUP} if place.table == "gguf_gemm" else {"BLOCK_K": block_k}
        words = {"BLOCK_M": block_m, "BLOCK_N": block_n, **depth, "warps": warps, "stages": stages}
    return {name: str(value) for name, value in words.items()}


def _needs(place: Place, sizes: Sizes, limits: Limits) -> tuple[int, int]:
    """Bytes of shared memory and registers per thread that the tiles alone take, about."""
    if place.table == "attention":
        rows, keys, warps, stages = sizes
        dim = int(str(place.key).split()[1])
        buffers = max(1, (stages - 1) // 2)  # see `attention_tuning.Blocks`
        shared = rows * dim * _ITEM + 2 * buffers * keys * dim * _ITEM
        numbers = rows * (dim + keys)
    elif place.table == "gguf_gemv":
        results, positions, warps = sizes
        shared, numbers = 0, results * positions
    else:
        block_m, block_n, block_k, warps, stages = sizes
        item = {"int8_gemm": 1, "int8_gemm_float32": 4}.get(place.table, _ITEM)
        shared = (stages - 1) * (block_m + block_n) * block_k * item
        numbers = block_m * block_n + (4 * block_n * block_k if place.table == "gguf_gemm" else 0)
    return shared, numbers // (warps * limits.threads) + _SPARE
