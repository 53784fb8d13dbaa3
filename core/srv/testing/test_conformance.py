"""The checks of the conformance kit as tests: `pytest --pyargs srv.testing --srv-device NAME`.

Without a device there is nothing to check: the only test is skipped and says so. The checks share one run with one
child process per level, so run them in one pytest process and in their order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import Check, Level, select
from srv.testing.conformance.runner import Session, session

_NO_DEVICE = (
    "no device: give --srv-device NAME (and, if the option is unknown, -p srv.testing.conformance.pytest_plugin)"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per check, up to the requested level."""
    if metafunc.config.getoption("--srv-device", default=None) is None:
        metafunc.parametrize("check", [pytest.param(None, id="none", marks=pytest.mark.skip(reason=_NO_DEVICE))])
        return
    level = Level[metafunc.config.getoption("--srv-level")]
    metafunc.parametrize("check", [pytest.param(check, id=check.name) for check in select(CHECKS, level)])


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The run that all checks share; its report is written when they are done."""
    with session(request.config.getoption("--srv-device")) as current:
        yield current
        path = request.config.getoption("--srv-report")
        if path is not None:
            current.report(Level[request.config.getoption("--srv-level")]).write(path)


def test_conformance(check: Check, conformance: Session) -> None:
    """The check passes or is skipped; a feature that works but is not declared is a skip that says so."""
    outcome = conformance.perform(check)
    if outcome.status in ("skipped", "undeclared"):
        pytest.skip(f"{outcome.status}: {outcome.message}")
    assert outcome.status == "passed", f"{outcome.message}\n{outcome.remedy}"
