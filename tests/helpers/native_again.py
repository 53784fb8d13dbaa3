"""Run the tests of the native kernels with another build of the library.

The child pytest loads this module as a plugin, which fails the run if the library is not used (the tests would skip).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from child_pytest import ROOT, Outcome, run
from compiling import COMPILING_S

from srv_kernels.cpu.library import load

HERE = Path(__file__).parent

PARTS = ("kernels", "shapes", "graph", "experts", "shared_reduce")
TESTS = (
    *(f"tests/kernels/cpu/test_native_{part}.py" for part in PARTS),
    *(f"tests/platforms/cpu/test_{part}.py" for part in ("attention", "latent_prefill")),
)
COVERED = (  # the kernels, and what their tests are made of
    *("kernels/srv_kernels/cpu", "kernels/srv_kernels/cases.py", "kernels/srv_kernels/contracts.py"),
    *("kernels/srv_kernels/expert_cases.py", "kernels/srv_kernels/tolerances.py"),
    *("tests/helpers/native_again.py", "tests/helpers/native_cases.py", "tests/helpers/native_linear_checked.py"),
    *TESTS,
)


def own_tests(library: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """Run the tests on every instruction set that this machine and the library support, until the first failure."""
    arguments = ("-p", __name__, "-x", "-k", "not fork and not TestLibrary", *(ROOT / each for each in TESTS))
    given = {"SRV_CPU_LIBRARY": str(library), "PYTHONPATH": str(HERE), **environment}
    return run(*arguments, seconds=COMPILING_S, environment=given)


def pytest_sessionstart() -> None:
    """End the run at once if the tests would not use the library that they must test."""
    wanted, loaded = os.environ["SRV_CPU_LIBRARY"], load()
    if loaded.library is None:
        raise pytest.UsageError(f"these tests would skip: {loaded.reason}")
    if loaded.library._name != wanted:
        raise pytest.UsageError(f"these tests would use {loaded.library._name}, not {wanted}")
