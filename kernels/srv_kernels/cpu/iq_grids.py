"""Writes native/iq_grids.h, the codebooks of GGUF's IQ1, IQ2 and IQ3 types, from those of the `gguf` library.

    python -m srv_kernels.cpu.iq_grids

The header is kept in the repository, since nothing but a compiler is installed when the native library is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
from gguf import quants

HEADER = Path(__file__).parent / "native" / "iq_grids.h"
_GRIDS = {
    "IQ1_GRID": quants.IQ1_S,  # also of IQ1_M
    "IQ2_XXS_GRID": quants.IQ2_XXS,
    "IQ2_XS_GRID": quants.IQ2_XS,
    "IQ2_S_GRID": quants.IQ2_S,
    "IQ3_XXS_GRID": quants.IQ3_XXS,
    "IQ3_S_GRID": quants.IQ3_S,
}
_PER_LINE = 14
_PREAMBLE = """\
// The codebooks of GGUF's IQ types, written by srv_kernels/cpu/iq_grids.py from the tables of the Python package gguf
// (ggml, MIT licence); do not edit. An entry is 8 indices of 2 bits (IQ1: of -1, 0 and 1; IQ2: of 8, 25 and 43), or 4
// of 3 bits (IQ3_XXS: of 4, 12, 20, 28, 36, 44, 52 and 62; IQ3_S: of 1, 3, ... 15), the first in the lowest bits.
#pragma once

#include <cstdint>

namespace srv {
"""


def header() -> str:
    """The text of the header."""
    return "\n".join((_PREAMBLE, *(line for name in _GRIDS for line in _array(name)), "}  // namespace srv", ""))


def _array(name: str) -> Iterator[str]:
    entries = _entries(name)
    yield f"inline constexpr uint16_t {name}[{len(entries)}] = {{"
    for first in range(0, len(entries), _PER_LINE):
        yield "    " + " ".join(f"0x{entry:04x}," for entry in entries[first : first + _PER_LINE])
    yield "};\n"


def _entries(name: str) -> list[int]:
    kind = _GRIDS[name]
    kind.init_grid()
    assert kind.grid is not None
    grid = kind.grid.reshape(kind.grid_shape)
    codes = numpy.searchsorted(numpy.array(kind.grid_map), grid)
    bits = 2 if len(kind.grid_map) == 3 else 3
    entries: list[int] = (codes << bits * numpy.arange(grid.shape[1])).sum(1).tolist()
    return entries


if __name__ == "__main__":
    HEADER.write_text(header())
