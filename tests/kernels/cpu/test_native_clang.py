"""The tests of the native kernels again, with kernels that Clang has compiled.

It compiles those of every instruction set; the tests run with the largest one that this processor has.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from compiling import COMPILING_S
from native_again import own_tests

from srv_kernels.cpu import build

COMPILER = "clang++"


@pytest.mark.proof(minutes=4.5)
@pytest.mark.timeout(COMPILING_S)
def test_kernels_compiled_by_clang_pass_their_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(COMPILER) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{COMPILER} is not there (Debian: clang)")
    monkeypatch.setenv("CXX", COMPILER)
    outcome = own_tests(build.build(tmp_path / "clang.so"), isas=1)
    assert outcome.passed, outcome.end
