"""The tests of the native kernels again, under AddressSanitizer and UndefinedBehaviorSanitizer.

With the smallest vectors and the largest instruction set that this processor has: the sources are the same, and what
differs is the width of vectors and which products there are.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from compiling import COMPILING_S
from native_again import own_tests

from srv_kernels.cpu import build


@pytest.mark.proof(minutes=8)
@pytest.mark.timeout(COMPILING_S)
def test_no_sanitizer_complains(tmp_path: Path) -> None:
    try:
        compiler = build.compiler()
    except build.CannotBuild as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    library = build.build(tmp_path / "sanitized.so", sanitize=True)
    # The runtimes come before the interpreter's own libraries, which were built without them.
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    outcome = own_tests(library, 2, environment)
    assert outcome.passed, outcome.end
