"""Fixtures of the tests of native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_isas import ISA_PARAMS, chosen

from srv_kernels.cpu.library import load


@pytest.fixture(params=ISA_PARAMS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select the kernels of one instruction set; afterwards the default ones, on one thread."""
    with chosen(request.param) as isa:
        yield isa
    load().library.srv_set_threads(1)


@pytest.fixture(params=(1, 2, 5))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The threads of native kernels; afterwards one."""
    library = load().library
    if library is None:
        pytest.skip(f"no native kernels here: {load().reason}")
    library.srv_set_threads(request.param)
    yield request.param
    library.srv_set_threads(1)
