"""The native kernels of one instruction set, for tests that run with each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from srv_kernels.cpu import build
from srv_kernels.cpu.library import load

ISAS = tuple(build.isas())
FAST = {"avx2", load().isa}  # the oldest with vectors, and the one that users of this machine get; the others are slow
ISA_PARAMS = [isa if isa in FAST else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS]


@contextmanager
def chosen(isa: str) -> Iterator[str]:
    """Select the kernels of an instruction set; afterwards the default ones. Skips where there are none."""
    loaded = load()
    if loaded.library is None:
        pytest.skip(f"no native kernels here: {loaded.reason}")
    best = loaded.isa
    if not loaded.library.srv_choose_isa(isa.encode()):
        pytest.skip(f"this processor, or this build, has no {isa}")
    yield isa
    loaded.library.srv_choose_isa(best.encode())
