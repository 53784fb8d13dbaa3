"""The CPU platform of this machine, and the instruction sets of its native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srv.platform.interface import Platform
from srv.platform.manifest import EngineContext
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_kernels.cpu import build
from srv_kernels.cpu.library import load


@pytest.fixture(scope="module")
def platform() -> Platform:
    found = find_platforms()["cpu"]
    device = probe(found).device
    assert device is not None
    return found.loaded.create(EngineContext(device, 0))


@pytest.fixture(params=tuple(build.isas()))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select the native kernels of one instruction set; afterwards the default ones."""
    loaded = load()
    if loaded.library is None:
        pytest.skip(f"no native kernels here: {loaded.reason}")
    best = loaded.isa
    if not loaded.library.srv_choose_isa(request.param.encode()):
        pytest.skip(f"this processor, or this build, has no {request.param}")
    yield request.param
    loaded.library.srv_choose_isa(best.encode())
