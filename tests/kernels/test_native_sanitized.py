"""The native kernels' own tests again, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srv_kernels.cpu import build

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_sanitizer_complains(tmp_path: Path) -> None:
    try:
        compiler = build.compiler()
    except build.CannotBuild as error:
        pytest.skip(str(error))
    library = build.build(tmp_path / "sanitized.so", sanitize=True)
    # The runtimes come before the interpreter's own libraries, which were built without them.
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "SRV_CPU_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    tests = [str(HERE / "test_native_kernels.py"), str(HERE.parent / "platforms" / "test_cpu_attention.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "not fork and not TestLibrary", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
