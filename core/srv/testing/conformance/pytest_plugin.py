"""The pytest plugin: `pytest --pyargs srv.testing --srv-device NAME [--srv-level L2] [--srv-report out.jsonl]`.

It brings the options alone; the tests are in `srv.testing.test_conformance`, one a check.
"""

from __future__ import annotations

import pytest

LEVELS = ("L0", "L1", "L2", "L3", "L4")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance tests."""
    group = parser.getgroup("srv-conformance", "conformance of platform plugins of srv")
    group.addoption("--srv-device", metavar="NAME[:VARIANT]", help="platform that the tests of srv.testing check")
    group.addoption("--srv-level", choices=LEVELS, default="L3", help="how deep they look (default: %(default)s)")
    group.addoption("--srv-report", metavar="FILE", help="write their report to FILE, as JSON lines")
