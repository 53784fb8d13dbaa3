"""The native kernels' own tests once more, over a library that was built in another way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
TESTS = (HERE / "test_native_kernels.py", HERE.parent / "platforms" / "test_cpu_attention.py")


def pass_with(library: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """The tests pass, on every instruction set that this machine and the library have."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "not fork and not TestLibrary", *map(str, TESTS)]
    given = {**os.environ, "SRV_CPU_LIBRARY": str(library), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
