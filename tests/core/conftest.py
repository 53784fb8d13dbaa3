"""Fixtures of all tests of core."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests: asyncio's, which the server uses."""
    return "asyncio"
