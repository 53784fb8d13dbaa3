"""Small models for the tests of whole engines."""

from __future__ import annotations

import pytest
from engine_small import SmallModels


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp)
