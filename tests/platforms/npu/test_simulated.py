"""The NPU platform on simulated devices, in child processes, because registering torch's npu device is permanent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_pytest import ROOT, Outcome, run

TESTS = ROOT / "platforms" / "npu" / "tests"
SIMULATOR = ROOT / "plugins" / "npu_simulator"


def run_on(soc: str, seconds: float, *arguments: str | Path) -> Outcome:
    """Run tests of the folder on a simulated device."""
    return run(*arguments, seconds=seconds, environment={"SRV_NPU_SIMULATOR": soc, "PYTHONPATH": str(SIMULATOR)})


@pytest.mark.slow
def test_device_attention_and_sampling_on_a2() -> None:
    files = ("on_device", "attention", "latent", "sampling", "copies", "experts")
    outcome = run_on("a2", 280, *(TESTS / f"test_npu_{name}.py" for name in files))
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.parametrize(
    "soc", [pytest.param("a2", marks=pytest.mark.slow), pytest.param("a3", marks=pytest.mark.proof(minutes=0.3))]
)
def test_windows_and_attention_to_later_tokens(soc: str) -> None:
    outcome = run_on(soc, 280, TESTS / "test_npu_windows.py")
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        pytest.param("a2", "demo-64", marks=pytest.mark.proof(minutes=4)),
        pytest.param("a2", "random-128", marks=pytest.mark.slow),
        pytest.param("a3", "random-128", marks=pytest.mark.proof(minutes=1)),
        pytest.param("a3", "demo-64 and greedy and graphs-float16", marks=pytest.mark.proof(minutes=1)),
    ],
)
def test_the_engine_computes_what_the_cpu_computes(soc: str, chosen: str) -> None:
    """A minute or two each on an idle machine. a3 runs only a part of the demo model's tests, which take the longest,
    because computation does not depend on the generation.
    """
    outcome = run_on(soc, 1700, TESTS / "test_npu_engine.py", "-k", chosen)
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.proof(minutes=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("soc", "devices", "asynchronous", "checks"),
    [
        ("a3", 2, "0", ("platform.communicator", "graph.communicator", "engine.ranks")),
        ("a2", 3, "1", ("platform.communicator", "graph.communicator")),
    ],
)
def test_ranks_communicate(soc: str, devices: int, asynchronous: str, checks: tuple[str, ...], tmp_path: Path) -> None:
    """Every operation, captured ones, a rank that stays away, and an engine of two ranks."""
    command = ("conformance", "run", "--device", "npu", "--level", "L3", "--report", str(tmp_path / "report.jsonl"))
    variables = {
        "SRV_NPU_SIMULATOR": soc,
        "SRV_NPU_SIMULATOR_COUNT": str(devices),
        "SRV_NPU_SIMULATOR_ASYNCHRONOUS": asynchronous,
        "PYTHONPATH": str(SIMULATOR),
    }
    process = subprocess.run(
        [sys.executable, "-m", "srv", *command, "--only", *checks],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert f"{len(checks)} passed" in process.stdout.splitlines()[-2], process.stdout + process.stderr
    assert f"{devices} ranks" in process.stdout


@pytest.mark.proof(minutes=2)
@pytest.mark.timeout(1800)
def test_models_that_generate_text_on_a2() -> None:
    outcome = run_on("a2", 1700, TESTS / "test_npu_models.py")
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.proof(minutes=1)
@pytest.mark.timeout(900)
def test_weights_in_host_memory_on_a2() -> None:
    outcome = run_on("a2", 880, TESTS / "test_npu_offload.py")
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        pytest.param("a2", "modernbert or jina or nomic", marks=pytest.mark.slow),
        pytest.param("a3", "distilbert or eurobert or gte or mistral", marks=pytest.mark.proof(minutes=0.7)),
    ],
)
def test_encoders_and_other_pooled_models(soc: str, chosen: str) -> None:
    """Each card runs a part: computation does not depend on the generation, and `make evidence` runs all on both."""
    outcome = run_on(soc, 880, TESTS / "test_npu_pooled_models.py", "-k", chosen)
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.proof(minutes=0.4)
@pytest.mark.parametrize("soc", ["a2-32g", "a3"])
def test_device_attention_and_sampling_on_other_cards(soc: str) -> None:
    files = ("test_npu_on_device.py", "test_npu_attention.py", "test_npu_latent.py", "test_npu_sampling.py")
    outcome = run_on(soc, 280, *(TESTS / file for file in files))
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end
