"""Tests in a pytest of their own: what registers a device with PyTorch claims it for the whole process, for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended: its status, its report, and what went to standard error."""

    status: int
    text: str
    errors: str

    @property
    def passed(self) -> bool:
        """Every test that ran passed, and there were some."""
        return self.status == 0 and " passed" in self.text

    @property
    def skipped(self) -> bool:
        """Some tests did not run."""
        return " skipped" in self.text

    @property
    def end(self) -> str:
        return self.text[-6000:] + self.errors[-2000:]


def run(*words: str | Path, seconds: float = 280, environment: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """Run pytest on these words.

    Modules beside the tests can be imported, as in a plugin's own checkout. No SRV_ variable of this process reaches
    it. environment: what it has beside that; entries of PYTHONPATH go before
    those of this process.
    """
    paths = (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=prepend", *map(str, words)],
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
    return Outcome(done.returncode, done.stdout, done.stderr)
