"""Run tests in a child pytest process, because registering a device with PyTorch cannot be undone in a process."""

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
    """The result of a pytest run: its exit status, standard output and standard error."""

    status: int
    text: str
    errors: str

    @property
    def passed(self) -> bool:
        """Whether every test that ran passed, and at least one ran."""
        return self.status == 0 and " passed" in self.text

    @property
    def skipped(self) -> bool:
        """Whether some tests were skipped."""
        return " skipped" in self.text

    @property
    def end(self) -> str:
        return self.text[-6000:] + self.errors[-2000:]


def run(*arguments: str | Path, seconds: float = 280, environment: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """Run pytest with these arguments.

    Modules in the folders of the tests can be imported, as in a plugin's own checkout. The child does not inherit
    SRV_ variables. `environment`: further variables; entries of its PYTHONPATH come before those of this process.
    """
    paths = (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=prepend", *map(str, arguments)],
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
    return Outcome(process.returncode, process.stdout, process.stderr)
