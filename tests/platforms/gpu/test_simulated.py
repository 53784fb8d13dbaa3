"""The GPU platforms on simulated devices, in child processes: registering a device with PyTorch is permanent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_pytest import ROOT, Outcome, run

pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")

TESTS = ROOT / "platforms" / "gpu" / "tests"
SIMULATOR = ROOT / "plugins" / "gpu_simulator"
OTHERS = ("sm86", "sm89", "sm100", "sm120", "gfx950", "gfx1100", "pvc")
DIFFERENT = ("sm80", "gfx942", "bmg")  # without float8, of AMD, without graphs
COVERED = ("platforms/gpu", "platforms/cuda", "platforms/rocm", "platforms/xpu", "plugins/gpu_simulator", "kernels")


def environment(variant: str, asynchronous: bool = False) -> dict[str, str]:
    found = {"SRV_GPU_SIMULATOR": variant, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SIMULATOR)}
    return found | ({"SRV_GPU_SIMULATOR_ASYNCHRONOUS": "1"} if asynchronous else {})


def run_on(variant: str, *arguments: str | Path, asynchronous: bool = False) -> Outcome:
    """Run tests of the folder on a simulated GPU."""
    return run(*arguments, seconds=280, environment=environment(variant, asynchronous))


def test_platform_attention_and_sampling_on_sm90() -> None:
    outcome = run_on("sm90", TESTS)
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.slow
@pytest.mark.when_changed(*COVERED)
@pytest.mark.parametrize("variant", [*DIFFERENT, *OTHERS])
def test_the_platform_on_other_gpus(variant: str) -> None:
    """Attention and sampling run on one card of each kind, because the kernels are the same."""
    outcome = run_on(variant, TESTS if variant in DIFFERENT else TESTS / "test_gpu_platform.py")
    assert outcome.passed, outcome.end


@pytest.mark.slow
@pytest.mark.when_changed(*COVERED)
@pytest.mark.parametrize("variant", ["sm90", "gfx942"])
def test_attention_and_sampling_while_operators_run_late(variant: str) -> None:
    outcome = run_on(variant, TESTS / "test_gpu_attention.py", TESTS / "test_gpu_sampling.py", asynchronous=True)
    assert outcome.passed, outcome.end


@pytest.mark.slow
@pytest.mark.when_changed(*COVERED)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("platform", "variant", "checks"),
    [
        ("cuda", "sm90", "engine.greedy engine.graphs engine.drafts"),
        ("rocm", "gfx942", "engine.greedy engine.graphs"),
        ("xpu", "bmg", "engine.greedy"),
    ],
)
def test_the_engine_computes_what_the_reference_computes(
    platform: str, variant: str, checks: str, tmp_path: Path
) -> None:
    """Minutes each: the kernels run in Triton's interpreter."""
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "srv", "conformance", "run", "--device", platform, "--report", str(report)]
    variables = environment(variant)
    paths = (variables.pop("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [*command, "--only", *checks.split()],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = [line for line in map(json.loads, report.read_text().splitlines()) if line.get("status") == "passed"]
    assert len(passed) == len(checks.split())
