"""The CPU platform of this machine."""

from __future__ import annotations

import pytest

from srv.platform.interface import Platform
from srv.platform.manifest import EngineContext
from srv.platform.probe import probe
from srv.platform.registry import find_platforms


@pytest.fixture(scope="module")
def platform() -> Platform:
    found = find_platforms()["cpu"]
    device = probe(found).device
    assert device is not None
    return found.loaded.create(EngineContext(device, 0))
