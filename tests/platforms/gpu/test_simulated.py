"""The GPU platforms on simulated devices, in child processes: registering a device with PyTorch is permanent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from child_pytest import ROOT, Outcome, run

pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")

TESTS = ROOT / "platforms" / "gpu" / "tests"
OFFLOAD = TESTS / "test_gpu_offload.py"  # engines with quantized weights: on one card
SIMULATOR = ROOT / "plugins" / "gpu_simulator"
OTHERS = ("sm86", "sm89", "sm100", "sm120", "gfx950", "gfx1100", "pvc")
DIFFERENT = ("sm80", "gfx942", "bmg")  # without float8, of AMD, without graphs
EVIDENCE = ROOT / "support_matrix" / "evidence"
PARTS = {"cuda-sm90": 12, "rocm-gfx942": 9}  # of the tests with evidence, so that each takes about two minutes


def environment(variant: str, asynchronous: bool = False) -> dict[str, str]:
    variables = {"SRV_GPU_SIMULATOR": variant, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SIMULATOR)}
    return variables | ({"SRV_GPU_SIMULATOR_ASYNCHRONOUS": "1"} if asynchronous else {})


def run_on(variant: str, *arguments: str | Path, asynchronous: bool = False, seconds: float = 280) -> Outcome:
    """Run tests of the folder on a simulated GPU, except those that are only for evidence."""
    return run("-m", "not covers", *arguments, seconds=seconds, environment=environment(variant, asynchronous))


@pytest.mark.proof(minutes=1.7)
def test_platform_attention_and_sampling_on_sm90() -> None:
    outcome = run_on("sm90", TESTS, f"--ignore={OFFLOAD}")
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.proof(minutes=1.5)
@pytest.mark.timeout(600)
def test_quantized_layers_in_host_memory() -> None:
    outcome = run_on("sm90", OFFLOAD, seconds=580)
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=pytest.mark.proof(minutes=minutes))
        for variants, minutes in ((DIFFERENT, 1.2), (OTHERS, 0.1))
        for variant in variants
    ],
)
def test_the_platform_on_other_gpus(variant: str) -> None:
    """Attention and sampling run on one card of each kind, because the kernels are the same."""
    tests = (TESTS, f"--ignore={OFFLOAD}") if variant in DIFFERENT else (TESTS / "test_gpu_platform.py",)
    outcome = run_on(variant, *tests)
    assert outcome.passed, outcome.end


@pytest.mark.proof(minutes=0.8)
@pytest.mark.parametrize("variant", ["sm90", "gfx942"])
def test_attention_and_sampling_while_operators_run_late(variant: str) -> None:
    outcome = run_on(variant, TESTS / "test_gpu_attention.py", TESTS / "test_gpu_sampling.py", asynchronous=True)
    assert outcome.passed, outcome.end


def recorded(device: str) -> list[str]:
    """The tests of the folder that have evidence on a device."""
    lines = (EVIDENCE / f"{device}.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(test for test in (json.loads(line)["test"] for line in lines) if (ROOT / test).is_relative_to(TESTS))


def test_every_simulated_gpu_with_evidence_is_here() -> None:
    simulated = {path.stem for path in EVIDENCE.glob("*.jsonl") if path.stem.startswith(("cuda", "rocm", "xpu"))}
    assert simulated == set(PARTS)


@pytest.mark.proof(minutes=1.5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("device", "part"), [(device, part) for device, n in PARTS.items() for part in range(n)])
def test_what_evidence_rests_on(device: str, part: int) -> None:
    platform, _, variant = device.partition("-")
    tests = recorded(device)[part :: PARTS[device]]
    assert tests
    outcome = run(f"--srv-evidence-device={platform}", *tests, seconds=1180, environment=environment(variant))
    assert outcome.passed, outcome.end
    assert not outcome.skipped, outcome.end
