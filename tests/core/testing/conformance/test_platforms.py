"""`ci/platform.sh` for every device of a machine without an accelerator: cpu, toy, and both simulated NPU generations.

It runs once per device in a separate process. The tests read its output: the doctor's report, the conformance report of
levels 0 to 4, and the evidence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[4]
LEVELS = ["L0", "L1", "L2", "L3", "L4"]


@dataclass(frozen=True)
class Case:
    """One device. `environment`: the variables that enable it. `tests`: the tests for its evidence (empty: all)."""

    device: str
    skipped: frozenset[str]
    environment: dict[str, str] = field(default_factory=dict)
    tests: tuple[str, ...] = ()
    simulated: bool = True

    @property
    def platform(self) -> str:
        return self.device.partition(":")[0]

    @property
    def out(self) -> Path:
        return ROOT / "build" / "ci" / self.device.replace(":", "-")


# Only the toy device and GPUs replay pieces.
PIECES = ("graph.pieces", "engine.pieces")
# Expected skips: checks of features that a device does not declare or cannot show. No dtype is served twice. NPUs
# support neither float32, nor sliding windows, nor capped scores; nor do they and the toy device add position biases.
CPU = frozenset(
    (*PIECES, "pool.accounting", "op.others", "engine.float32", "arguments.refused", "arguments.undeclared")
)
# Neither the toy device nor NPUs support weights that stay quantized, and keys and values of 8 bits.
KEPT = (
    *("op.linear_int8", "op.linear_fp8", "op.linear_gguf", "op.rows_gguf", "op.experts_gguf", "op.experts_fp8"),
    *("attention.int8_kv", "attention.fp8_kv"),
)
# Neither of them has a communicator.
RANKS = ("platform.communicator", "graph.communicator", "engine.ranks")
COMPILED = "engine.compiled"  # only the CPU compiles steps
TOY = frozenset(
    (
        *KEPT,
        *RANKS,
        COMPILED,
        "attention.alibi",
        "attention.sinks",
        "attention.chunks",
        "attention.both_ways",
        "attention.latent",
        "engine.float32",
        "arguments.refused",
        "arguments.undeclared",
    )
)
NPU = frozenset(
    (
        *KEPT,
        *RANKS,
        *PIECES,
        COMPILED,
        "op.others",
        "attention.soft_cap",
        "attention.alibi",
        "attention.sinks",
        "attention.chunks",
        "engine.float32",
        "engine.bfloat16",
    )
)

CASES = (
    # `make test-all` runs all evidence of the processor anyway.
    Case("cpu", CPU, tests=("tests/platforms/cpu/test_ops.py",), simulated=False),
    Case("toy", TOY),
    Case("npu:a2", NPU, {"SRV_NPU_SIMULATOR": "a2"}),
    # The same tests as on a2, which differs in what is declared; so the ones about arguments.
    Case("npu:a3", NPU, {"SRV_NPU_SIMULATOR": "a3"}, ("tests/e2e/test_e2e_arguments.py",)),
)


@dataclass(frozen=True)
class Ran:
    """A completed run, and the committed evidence before and after it."""

    case: Case
    done: subprocess.CompletedProcess[str]
    before: dict[str, bytes]
    after: dict[str, bytes]

    def report(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.case.out / "conformance.jsonl").read_text().splitlines()]


def evidence() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (ROOT / "support_matrix" / "evidence").iterdir()}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.device)
def ran(request: pytest.FixtureRequest) -> Ran:
    case: Case = request.param
    for name in ("doctor.json", "conformance.jsonl", "evidence.jsonl"):
        (case.out / name).unlink(missing_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "PYTEST_"))}
    before = evidence()
    done = subprocess.run(
        [
            "bash",
            "ci/platform.sh",
            "--quick",
            *(word for path in case.tests for word in ("--tests", path)),
            case.device,
        ],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        cwd=ROOT,
        env={**inherited, "PYTHON": sys.executable, **case.environment},
    )
    return Ran(case, done, before, evidence())


def test_the_script_ends_well_and_adds_nothing_to_the_matrix(ran: Ran) -> None:
    assert ran.done.returncode == 0, ran.done.stdout[-6000:] + ran.done.stderr[-3000:]
    assert "no benchmarks: --quick" in ran.done.stdout
    assert ran.after == ran.before, "quick mode adds nothing to the matrix"


def test_the_doctor_finds_what_was_asked_for(ran: Ran) -> None:
    doctor = json.loads((ran.case.out / "doctor.json").read_text())
    (platform,) = doctor["platforms"]
    assert (doctor["can_start"], doctor["choice"]["platform"]) == (True, ran.case.platform)
    assert platform["simulated"] is ran.case.simulated


def test_it_conforms_to_level_4(ran: Ran) -> None:
    """All declared features work; only checks of undeclared features are skipped."""
    run, *outcomes = ran.report()
    assert (run["kind"], run["level"], run["device"]["platform"]) == ("run", "L4", ran.case.platform)
    assert run["device"]["simulated"] is ran.case.simulated
    assert ran.case.device in (ran.case.platform, f"{ran.case.platform}:{run['device']['variant']}")
    assert surprises(outcomes, ran.case) == []
    assert sorted({each["level"] for each in outcomes if each["status"] == "passed"}) == LEVELS


def surprises(outcomes: list[dict[str, Any]], case: Case) -> list[str]:
    """Every outcome that is neither a pass nor an expected skip, as a line."""
    return [
        f"{each['check']} {each['status']}: {each['message']} {each['remedy']}"
        for each in outcomes
        if each["status"] != "passed" and not (each["status"] == "skipped" and each["check"] in case.skipped)
    ]


def test_what_it_shows_is_of_this_platform_and_no_greener_than_it_is(ran: Ran) -> None:
    shown = [json.loads(line) for line in (ran.case.out / "evidence.jsonl").read_text().splitlines()]
    assert shown
    assert {row["platform"] for row in shown} == {ran.case.platform}
    if ran.case.simulated:
        assert {row["level"] for row in shown} <= {"E0", "E1", "E2", "E3"}
    if ran.case.tests:
        assert {row["test"].partition("::")[0] for row in shown} == set(ran.case.tests)
