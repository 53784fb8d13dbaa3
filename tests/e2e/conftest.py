"""One server per module; failures show its log, and the summary shows the measurements of tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from e2e_support import Server, served
from letters_model import refusal_of, write_accepted_model

from srv_matrix.pytest_plugin import ANY_MACHINE

SHOWN_LOG_CHARACTERS = 6000


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, srv_device: str
) -> Iterator[Server]:
    """The demo model on the device under test, with the module's `SERVER_ARGUMENTS`. Must end with status 0.

    On the CPU the module's `PROCESSOR_ARGUMENTS` are added.
    """
    arguments: tuple[str, ...] = getattr(request.module, "SERVER_ARGUMENTS", ())
    if srv_device == ANY_MACHINE:
        arguments += getattr(request.module, "PROCESSOR_ARGUMENTS", ())
    elif refusal := refusal_of("--device", srv_device, *arguments):
        pytest.skip(f"needs a platform that accepts the demo model; {srv_device} refuses it: {refusal}")
    log = tmp_path_factory.mktemp("server") / "log"
    with served(log, "--device", srv_device, *arguments) as running:
        yield running


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory: pytest.TempPathFactory, srv_device: str) -> Path:
    """The folder of a very small model without weights, which the device under test accepts."""
    return write_accepted_model(tmp_path_factory.mktemp("model") / "letters", srv_device)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Server):
                report.sections.append((f"log of {name}", value.log_text()[-SHOWN_LOG_CHARACTERS:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the properties that tests have recorded, including those of failed tests."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    measured = [report for report in reports if report.user_properties]
    if measured:
        terminalreporter.section("measured")
    for report in measured:
        terminalreporter.write_line(report.nodeid)
        for name, value in report.user_properties:
            terminalreporter.write_line(f"    {name}: {value}")
