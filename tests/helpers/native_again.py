"""Run the tests of the native kernels with another build of the library.

The child pytest loads this module as a plugin, which selects tests by instruction set, and fails the run if the library
is not used (the tests would skip).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from child_pytest import ROOT, Outcome, run
from compiling import COMPILING_S

from srv_kernels.cpu import build
from srv_kernels.cpu.library import load

HERE = Path(__file__).parent
CHOSEN = "NATIVE_TEST_ISAS"  # the variable with the number of instruction sets of a child

PARTS = ("kernels", "shapes", "graph", "experts", "shared_reduce")
TESTS = (
    *(f"tests/kernels/cpu/test_native_{part}.py" for part in PARTS),
    *(f"tests/platforms/cpu/test_{part}.py" for part in ("attention", "latent_prefill")),
)


def own_tests(library: Path, isas: int, environment: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """Run the tests until the first failure, in two processes, as their slice of the proof has little else to run.

    isas: how many of the instruction sets that this processor and the library have: 1 is the largest, 2 the smallest
    vectors as well. Tests that are of no instruction set run in any case.
    """
    selected = ("-k", "not fork and not TestLibrary", *(ROOT / test for test in TESTS))
    arguments = ("-p", __name__, "-n", "2", "-x", *selected)
    variables = {"SRV_CPU_LIBRARY": str(library), CHOSEN: str(isas), "PYTHONPATH": str(HERE)}
    return run(*arguments, seconds=COMPILING_S, environment={**variables, **environment})


def pytest_sessionstart() -> None:
    """End the run at once if the tests would not use the library that they must test."""
    wanted, loaded = os.environ["SRV_CPU_LIBRARY"], load()
    if loaded.library is None:
        raise pytest.UsageError(f"these tests would skip: {loaded.reason}")
    if loaded.library._name != wanted:
        raise pytest.UsageError(f"these tests would use {loaded.library._name}, not {wanted}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    loaded = load()
    assert loaded.library is not None
    best = loaded.isa
    isas = [isa for isa in build.isas() if loaded.library.srv_choose_isa(isa.encode())]
    loaded.library.srv_choose_isa(best.encode())
    chosen = isas[-1:] if os.environ[CHOSEN] == "1" else [*isas[1:2], isas[-1]]
    others = [item for item in items if _isa(item) not in (None, *chosen)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if not any(map(_isa, items)):
        raise pytest.UsageError(f"no test would run with {' or '.join(chosen)}")


def _isa(item: pytest.Item) -> str | None:
    """The instruction set that a test runs with, None if it has no such parameter."""
    isa = item.callspec.params.get("isa") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return str(isa) if isa is not None else None
