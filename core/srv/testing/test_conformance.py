"""The checks of the conformance kit as tests: `pytest --pyargs srv.testing --srv-device NAME`.

Without a device there is nothing to check, and the one test that is left says so. Checks share a run, so that each
level is one process; they are meant for one pytest process, in their own order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import Check, Level, select
from srv.testing.conformance.runner import Session, session

_WITHOUT = (
    "no device: give --srv-device NAME (and, where the option is unknown, -p srv.testing.conformance.pytest_plugin)"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a check, up to the level asked for."""
    if metafunc.config.getoption("--srv-device", default=None) is None:
        metafunc.parametrize("check", [pytest.param(None, id="none", marks=pytest.mark.skip(reason=_WITHOUT))])
        return
    level = Level[metafunc.config.getoption("--srv-level")]
    metafunc.parametrize("check", [pytest.param(check, id=check.name) for check in select(CHECKS, level)])


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The run that all checks belong to; its report is written when they are done."""
    with session(request.config.getoption("--srv-device")) as running:
        yield running
        path = request.config.getoption("--srv-report")
        if path is not None:
            running.report(Level[request.config.getoption("--srv-level")]).write(path)


def test_conformance(check: Check, conformance: Session) -> None:
    """The check passes, or does not apply; what works and is not declared is a skip that says so."""
    outcome = conformance.perform(check)
    if outcome.status in ("skipped", "undeclared"):
        pytest.skip(f"{outcome.status}: {outcome.message}")
    assert outcome.status == "passed", f"{outcome.message}\n{outcome.remedy}"
