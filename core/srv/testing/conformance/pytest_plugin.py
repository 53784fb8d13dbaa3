"""The pytest plugin: `pytest --pyargs srv.testing --srv-device NAME [--srv-level L2] [--srv-report out.jsonl]`.

It adds only the options; the tests are in `srv.testing.test_conformance`, one per check.
"""

from __future__ import annotations

import pytest

LEVELS = ("L0", "L1", "L2", "L3", "L4")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance tests."""
    group = parser.getgroup("srv-conformance", "conformance of platform plugins of srv")
    group.addoption("--srv-device", metavar="NAME[:VARIANT]", help="platform to check")
    group.addoption("--srv-level", choices=LEVELS, default="L3", help="highest level to check (default: %(default)s)")
    group.addoption("--srv-report", metavar="FILE", help="write the report to FILE, as JSON lines")
