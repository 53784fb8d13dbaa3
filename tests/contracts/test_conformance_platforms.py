"""The conformance kit's verdict on whole platforms: cpu and toy keep all that they declare, and serve."""

from __future__ import annotations

import pytest

from srv.testing.conformance import Level, Report, run

# What these two platforms do not declare or cannot show, by check; anything else that is skipped is a surprise.
SKIPPED = {
    "cpu": {"pool.accounting", "graph.replay", "graph.lengths", "graph.padding", "graph.counts", "op.others",
            "engine.float32", "engine.graphs", "arguments.refused", "arguments.undeclared"},
    "toy": {"op.others", "engine.float32", "arguments.refused", "arguments.undeclared"},
}  # fmt: skip


def surprises(report: Report, device: str) -> list[str]:
    """Every outcome that is neither a pass nor an expected skip, as a line."""
    return [
        f"{outcome.check} {outcome.status}: {outcome.message} {outcome.remedy}"
        for outcome in report.outcomes
        if outcome.status != "passed" and not (outcome.status == "skipped" and outcome.check in SKIPPED[device])
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", ["cpu", "toy"])
def test_laws_references_and_engine_hold(device: str) -> None:
    report = run(device, Level.L3)
    assert surprises(report, device) == []
    assert {outcome.level for outcome in report.of("passed")} == {Level.L0, Level.L1, Level.L2, Level.L3}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", "toy"])
def test_what_is_declared_of_arguments_is_served(device: str) -> None:
    report = run(device, Level.L4, only=("manifest", "server", "arguments"))
    assert surprises(report, device) == []
    assert report.outcome("arguments.supported").status == "passed"
