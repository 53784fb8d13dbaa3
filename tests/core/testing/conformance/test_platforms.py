"""The conformance suite on every kind of device of a machine without an accelerator, in processes of their own.

Up to level 3 (a simulated GPU: up to level 1) it runs with the slow tests. The proof runs `ci/platform.sh` on cpu, toy,
and both simulated NPU generations, and reads its output: the doctor's report, the conformance report of levels 0 to 4,
and the evidence.
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

pytestmark = pytest.mark.timeout(1800)

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
    (
        *PIECES,
        "pool.accounting",
        "pool.allocatable",
        "op.others",
        "engine.float32",
        "arguments.refused",
        "arguments.undeclared",
    )
)
# Neither the toy device nor NPUs support weights that stay quantized, and keys and values of 8 bits.
KEPT = (
    *("op.linear_int8", "op.linear_fp8", "op.linear_gguf", "op.rows_gguf", "op.experts_gguf", "op.experts_fp8"),
    *("attention.int8_kv", "attention.fp8_kv", "graph.kv_dtypes"),
)
# Neither of them declares it.
INVARIANT = ("op.batch_invariant", "attention.batch_invariant")
# There is one toy device, and one NPU, on which a second rank has no device.
RANKS = ("platform.communicator", "graph.communicator", "engine.ranks")
COMPILED = "engine.compiled"  # only the CPU compiles steps
TOY = frozenset(
    (
        *KEPT,
        "graph.latent",
        *RANKS,
        *INVARIANT,
        COMPILED,
        "attention.device_lengths",
        "attention.alibi",
        "attention.sinks",
        "attention.chunks",
        "attention.temperature",
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
        *INVARIANT,
        *PIECES,
        COMPILED,
        "pool.allocatable",
        "op.others",
        "attention.device_lengths",
        "attention.soft_cap",
        "attention.alibi",
        "attention.sinks",
        "attention.chunks",
        "attention.temperature",
        "engine.float32",
        "engine.bfloat16",
    )
)

CASES = (
    # The other tiers run all evidence of the processor anyway.
    Case("cpu", CPU, tests=("tests/platforms/cpu/test_ops.py",), simulated=False),
    Case("toy", TOY),
    # Models are proofs in tests/platforms/npu. a3 differs in what is declared: it runs what is of arguments.
    Case(
        "npu:a2", NPU, {"SRV_NPU_SIMULATOR": "a2"}, ("tests/e2e/test_e2e_openai.py", "tests/e2e/test_e2e_arguments.py")
    ),
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


def inherited() -> dict[str, str]:
    """The variables of this process, without those of srv and pytest."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "PYTEST_"))}


# Higher levels exercise other backends; there is one GPU, and so no second rank.
GPU = Case(
    "cuda",
    frozenset({"backends.exercised", "platform.communicator", "pool.allocatable"}),
    {"SRV_GPU_SIMULATOR": "sm90", "TRITON_INTERPRET": "1"},
)
LEVEL_OF = {"cpu": "L3", "toy": "L3", "npu:a2": "L3", "cuda": "L1"}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[:2]),
        pytest.param(CASES[2], marks=pytest.mark.proof(minutes=2.5)),  # what it simulates is simulated in Python
        pytest.param(GPU, marks=pytest.mark.proof(minutes=1.5)),  # its kernels are interpreted
    ],
    ids=lambda case: case.device,
)
def test_the_suite_passes(case: Case, tmp_path: Path) -> None:
    """All declared features work; only checks of undeclared features are skipped."""
    if case is GPU:
        pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")
    report, level = tmp_path / "report.jsonl", LEVEL_OF[case.device]
    command = [sys.executable, "-m", "srv", "conformance", "run", "--device", case.platform, "--level", level]
    paths = [str(ROOT / "plugins" / "gpu_simulator"), os.environ.get("PYTHONPATH", "")]
    environment = {**inherited(), **case.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(
        [*command, "--report", str(report)], capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-3000:]
    run, *outcomes = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    assert (run["level"], run["device"]["platform"]) == (level, case.platform)
    assert surprises(outcomes, case) == []
    passed = {outcome["level"] for outcome in outcomes if outcome["status"] == "passed"}
    assert sorted(passed) == LEVELS[: LEVELS.index(level) + 1]


@pytest.mark.slow
def test_ranks_of_the_toy_device_communicate(tmp_path: Path) -> None:
    """Every collective operation, captured ones, and an engine of two ranks; each rank has a device that runs late."""
    report, checks = tmp_path / "report.jsonl", ("platform.communicator", "graph.communicator", "engine.ranks")
    command = [sys.executable, "-m", "srv", "conformance", "run", "--device", "toy", "--level", "L3", "--only", *checks]
    environment = {**inherited(), "OMP_NUM_THREADS": "1", "SRV_TOY_DEVICES": "3", "SRV_TOY_ASYNCHRONOUS": "1"}
    done = subprocess.run(
        [*command, "--report", str(report)], capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    outcomes = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()][1:]
    assert {each["check"] for each in outcomes if each["status"] == "passed"} >= set(checks)


PLATFORM_SH = [
    pytest.param(case, marks=[pytest.mark.proof(minutes=1.2), pytest.mark.xdist_group(f"platform.sh {case.device}")])
    for case in CASES
]


@pytest.fixture(scope="module", params=PLATFORM_SH, ids=lambda case: case.device)
def ran(request: pytest.FixtureRequest) -> Ran:
    case: Case = request.param
    for name in ("doctor.json", "conformance.jsonl", "evidence.jsonl"):
        (case.out / name).unlink(missing_ok=True)
    before = evidence()
    process = subprocess.run(
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
        env={**inherited(), "PYTHON": sys.executable, **case.environment},
    )
    return Ran(case, process, before, evidence())


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
    assert sorted({outcome["level"] for outcome in outcomes if outcome["status"] == "passed"}) == LEVELS


def surprises(outcomes: list[dict[str, Any]], case: Case) -> list[str]:
    """Every outcome that is neither a pass nor an expected skip, as a line."""
    return [
        f"{outcome['check']} {outcome['status']}: {outcome['message']} {outcome['remedy']}"
        for outcome in outcomes
        if outcome["status"] != "passed" and not (outcome["status"] == "skipped" and outcome["check"] in case.skipped)
    ]


def test_what_it_shows_is_of_this_platform_and_no_greener_than_it_is(ran: Ran) -> None:
    shown = [json.loads(line) for line in (ran.case.out / "evidence.jsonl").read_text().splitlines()]
    assert shown
    assert {row["platform"] for row in shown} == {ran.case.platform}
    if ran.case.simulated:
        assert {row["level"] for row in shown} <= {"E0", "E1", "E2", "E3"}
    if ran.case.tests:
        assert {row["test"].partition("::")[0] for row in shown} == set(ran.case.tests)
