"""Tests in a pytest of their own: what registers a device with PyTorch claims it for the whole process, for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]


def passes(*words: str | Path, seconds: float = 280, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run pytest on these words and give its output; every test must pass, and there must be some.

    No SRV_ variable of this process reaches it. environment: what it has beside that; entries of PYTHONPATH go before
    those of this process.
    """
    paths = (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, words)],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("SRV_")},
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTEST_ADDOPTS": "",
            "PYTEST_XDIST_WORKER": "",
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout
