"""The native kernels' own tests once more, over a library that was built in another way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "platforms"))

from child_pytest import Outcome, run  # noqa: E402 - where it lies is said just above

TESTS = (HERE / "test_native_kernels.py", HERE.parent / "platforms" / "test_cpu_attention.py")


def own_tests(library: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """How they end, on every instruction set that this machine and the library have, up to the first that fails."""
    words = ("-x", "-k", "not fork and not TestLibrary", *TESTS)
    return run(*words, seconds=850, environment={"SRV_CPU_LIBRARY": str(library), **environment})
