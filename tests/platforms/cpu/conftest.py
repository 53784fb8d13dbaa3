"""The CPU platform of this machine, and the instruction sets of its native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_isas import ISA_PARAMS, chosen

from srv.platform.interface import Platform
from srv.platform.manifest import EngineContext
from srv.platform.probe import probe
from srv.platform.registry import find_platforms


@pytest.fixture(scope="module")
def platform() -> Platform:
    installed = find_platforms()["cpu"]
    device = probe(installed).device
    assert device is not None
    return installed.loaded.create(EngineContext(device, 0))


@pytest.fixture(params=ISA_PARAMS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select the native kernels of one instruction set; afterwards the default ones."""
    with chosen(request.param) as isa:
        yield isa
