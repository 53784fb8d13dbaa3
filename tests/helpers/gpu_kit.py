"""The conformance kit on a simulated GPU, in a child process, with a record of the kernels that it launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from child_pytest import ROOT

from srv.testing.conformance.catalogue import CHECKS
from srv_gpu import triton_ops
from srv_kernels.triton.compile import TABLE
from srv_kernels.triton.launches import VARIABLE, launched
from srv_kernels.triton.registration import OPS

SIMULATOR = ROOT / "plugins" / "gpu_simulator"
# FP8 by FP8, on the GPUs that multiply that, for more rows than the cases of the kit have; their tests are in
# tests/kernels/triton/test_triton_fp8.py.
FOR_MANY_ROWS = {"linear_fp8_quantized", "fp8_products_kernel", "quantize_groups_kernel"}


def run_kit(
    folder: Path, platform: str, variant: str, level: str, *only: str, devices: int = 1
) -> tuple[set[str], set[str], set[str]]:
    """The checks that passed, and the operators and kernels that were launched. Fails if a check does."""
    report, launches = folder / "report.jsonl", folder / "launches"
    command = [sys.executable, "-m", "srv", "conformance", "run", "--device", platform, "--level", level]
    paths = (str(SIMULATOR), os.environ.get("PYTHONPATH"))
    variables = {
        **{"SRV_GPU_SIMULATOR": variant, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", VARIABLE: str(launches)},
        "SRV_GPU_SIMULATOR_COUNT": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    process = subprocess.run(
        [*command, "--report", str(report), *(("--only", *only) if only else ())],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    lines = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    passed = {line["check"] for line in lines if line.get("status") == "passed"}
    return passed, *(launched(launches) if launches.exists() else (set(), set()))  # without a launch there is no file


def run_kit_in_two(
    folder: Path, platform: str, variant: str, level: str, *only: str
) -> tuple[set[str], set[str], set[str]]:
    """As `run_kit`, with the checks of operators, which take more than half of the time, in a process of their own."""
    groups = only or sorted({check.group for check in CHECKS})
    assert "op" in groups
    parts = {"operators": ("op",), "others": tuple(group for group in groups if group != "op")}

    def run(part: str) -> tuple[set[str], set[str], set[str]]:
        (folder / part).mkdir()
        return run_kit(folder / part, platform, variant, level, *parts[part])

    with ThreadPoolExecutor() as pool:
        passed, operators, kernels = zip(*pool.map(run, parts), strict=True)
    return set().union(*passed), set().union(*operators), set().union(*kernels)


def declared_operators() -> set[str]:
    """The operators of the GPU platforms."""
    return {name for name in OPS if hasattr(triton_ops, name)}


def declared_kernels() -> set[str]:
    """The names of all kernels, as they are compiled ahead of time."""
    kernels = json.loads(TABLE.read_text(encoding="utf-8"))["kernels"]
    return {name.rpartition(".")[2] for name in kernels}


def check_launches(passed: set[str], operators: set[str], kernels: set[str]) -> None:
    """That every declared operator and kernel was launched, by checks that passed, but for those of `FOR_MANY_ROWS`."""
    assert {"op.linear_gguf", "attention.long_rows", "sampler.exact", "copies.pages"} <= passed
    assert sorted(declared_operators() - operators - FOR_MANY_ROWS) == []
    assert sorted(declared_kernels() - kernels - FOR_MANY_ROWS) == []
