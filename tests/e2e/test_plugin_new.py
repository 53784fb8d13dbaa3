"""The output of `srv plugin new` works unedited in an empty environment with the wheels of `srv` and `srv-kernels`.

This is the situation of a vendor: there is no checkout, and nothing on the import path that is not from a wheel. The
package builds, installs, is found by the doctor, serves, passes its own tests, and conforms.

    wheels of this tree ──► empty environment ──► srv plugin new ──► its wheel ──► the same environment
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from compiling import COMPILING_S
from e2e_support import Server, greedy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.proof(minutes=0.7),
    pytest.mark.xdist_group("plugin new"),
    pytest.mark.timeout(COMPILING_S),
]

NAME = "acme"
ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip")
FROM_SOURCE = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
FROM_WHEELS = ("install", "-q", "--no-deps", "--no-index")


def environment() -> dict[str, str]:
    """The caller's environment without variables that affect Python or srv."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "PYTHON", "PYTEST_"))
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def run(command: Sequence[str | Path], where: Path, seconds: float = 280) -> str:
    """Run a command, which must end with status 0; returns its output."""
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, cwd=where, env=environment()
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-3000:]
    return process.stdout


@dataclass(frozen=True)
class Installed:
    """The environment, and the working folder with the source of the new package."""

    prefix: Path
    work: Path

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    @property
    def package(self) -> Path:
        return self.work / f"srv-{NAME}"

    def srv(self, *arguments: str, seconds: float = 280) -> str:
        return run([self.prefix / "bin" / "srv", *arguments], self.work, seconds)


def borrow(site: Path) -> None:
    """Link all third-party packages (gigabytes) of this environment into the new one, but none of this tree.

    Each entry is linked separately, because a `.pth` file here leads to this tree, and metadata has its entry points.
    """
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix != ".pth" and not entry.name.lower().lstrip("_").startswith("srv"):
            (site / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("new")
    installation = Installed(folder / "environment", folder / "work")
    installation.work.mkdir()
    venv.create(installation.prefix, with_pip=False)
    (site,) = (installation.prefix / "lib").glob("python*/site-packages")
    borrow(site)
    wheels = folder / "wheels"
    run([*PIP, *FROM_SOURCE, "--wheel-dir", wheels, ROOT, ROOT / "kernels"], folder, COMPILING_S)
    run([*PIP, "--python", installation.python, *FROM_WHEELS, *wheels.iterdir()], folder)
    installation.srv("plugin", "new", NAME, "--into", str(installation.work))
    wheel_folder = folder / "own"
    run([*PIP, *FROM_SOURCE, "--wheel-dir", wheel_folder, installation.package], folder)
    run([*PIP, "--python", installation.python, *FROM_WHEELS, *wheel_folder.iterdir()], folder)
    return installation


def test_nothing_comes_from_the_checkout(installed: Installed) -> None:
    """All our packages are imported from the environment, and the import path does not lead to the checkout."""
    script = (
        "import json, sys, importlib.metadata as m, srv, srv_kernels, srv_cpu, srv_matrix, srv_acme\n"
        "files = [each.__file__ for each in (srv, srv_kernels, srv_cpu, srv_matrix, srv_acme)]\n"
        "ours = sorted({d.name for d in m.distributions() if d.name.startswith('srv')})\n"
        "print(json.dumps([files, sys.path, ours]))\n"
    )
    files, path, ours = json.loads(run([installed.python, "-c", script], installed.work))
    assert [file for file in files if not Path(file).is_relative_to(installed.prefix)] == []
    assert [entry for entry in path if entry and Path(entry).resolve().is_relative_to(ROOT)] == []
    assert ours == ["srv", f"srv-{NAME}", "srv-kernels"]


def test_the_doctor_says_that_a_server_can_start_on_it(installed: Installed) -> None:
    (platform,) = json.loads(installed.srv("doctor", "--device", NAME, "--json"))["platforms"]
    assert (platform["distribution"], platform["simulated"], platform["usable"]) == (f"srv-{NAME}", True, True)
    assert {finding["status"] for finding in platform["findings"]} == {"ok"}


def test_it_serves_an_answer(installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(installed.work)
    arguments = ("--device", NAME, "--dtype", "float32", "--max-total-tokens", "1024")
    server = Server(arguments, tmp_path / "log", program=(str(installed.prefix / "bin" / "srv"),))
    server.start()
    try:
        assert server.get("/get_server_info").json()["platform"] == NAME
        assert len(server.generate(**greedy("The capital of France is", 6))["output_ids"]) == 6
        assert server.stop() == 0
    finally:
        server.kill()


def test_it_passes_its_own_tests(installed: Installed) -> None:
    output = run(
        [installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", installed.package / "tests"],
        installed.package,
    )
    assert " passed" in output


def follow_the_readme(package: Path) -> None:
    """Variants of one's own, fewer dtypes and features, no graphs, and a device that is no simulation any more.

    What has the place of the simulated accelerator is that accelerator, outside of the package.
    """
    sources = package / f"srv_{NAME}"
    changes = {
        sources / "manifest.py": (
            ("simulated=True,", ""),
            ("priority=0,", "priority=5,"),
            (f"from srv_{NAME}.settings", f"from {NAME}_driver"),
            (f"from srv_{NAME}.device", f"from {NAME}_torch"),
        ),
        sources / "facts.py": (
            (f'VARIANT = "{NAME}1"', 'VARIANT = "acme_pro"'),
            (', "graphs", "piecewise_graphs", "w8a8")', ")"),
            ('*("float32", "float16", "bfloat16")', '*("float32", "bfloat16")'),
            ("                graphs=True,\n", ""),
            (', "linear_w8a8", "linear_w8a8_static"', ""),
        ),
        sources / "platform.py": (
            (f"from srv_{NAME}.device", f"from {NAME}_torch"),
            (f"from srv_{NAME}.graphs import AcmeGraphs\n", ""),
            ("        self._graphs = AcmeGraphs(accelerator)\n", ""),
            (
                "def graphs(self) -> Graphs:\n        return self._graphs",
                "def graphs(self) -> Graphs | None:\n        return None",
            ),
            (
                "    def graph_piece(self) -> AbstractContextManager[Callable[[], None]]:\n"
                "        return self._graphs.piece()\n\n",
                "",
            ),
            ("from contextlib import AbstractContextManager\n", ""),
        ),
    }
    for path, replacements in changes.items():
        text = path.read_text()
        for old, new in replacements:
            assert old in text, f"{path.name} has no {old!r}: this test changes what the README says"
            text = text.replace(old, new)
        path.write_text(text)
    (sources / "graphs.py").unlink()
    (sources / "device").rename(package / f"{NAME}_torch")
    (sources / "settings.py").rename(package / f"{NAME}_driver.py")
    for path in (package / f"{NAME}_torch").rglob("*.py"):
        text = path.read_text().replace(f"srv_{NAME}.device", f"{NAME}_torch")
        path.write_text(text.replace(f"srv_{NAME}.settings", f"{NAME}_driver"))


def test_its_tests_pass_when_the_advice_of_its_readme_is_followed(installed: Installed, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(installed.package, package, ignore=shutil.ignore_patterns("__pycache__", "build"))
    follow_the_readme(package)
    output = run([installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", package / "tests"], package)
    assert " passed" in output
    assert " skipped" not in output
    level = ("--device", NAME, "--level", "L1")  # in a process that finds the changed package first
    assert " passed" in run([installed.python, "-m", "srv", "conformance", "run", *level], package)


def test_its_extra_for_tests_has_what_they_import(installed: Installed) -> None:
    project = tomllib.loads((installed.package / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[^\w-]", requirement)[0] for requirement in project["optional-dependencies"]["test"]}
    installed_names = {
        f"srv_{NAME}",
        "srv",
        "srv_kernels",
        "srv_matrix",
        "torch",
        "numpy",
        "msgspec",
        "transformers",
        *extra,
    }
    tests = sorted((installed.package / "tests").glob("*.py"))
    nodes = [node for path in tests for node in ast.walk(ast.parse(path.read_text()))]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    tops = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert tops - installed_names - {path.stem for path in tests} == set()


def test_the_guide_comes_with_the_wheel(installed: Installed) -> None:
    assert installed.srv("plugin", "docs") == (ROOT / "docs" / "plugin-authors.md").read_text()
    assert installed.srv("plugin", "docs", "conformance") == (ROOT / "docs" / "conformance.md").read_text()


def test_it_conforms_to_level_3(installed: Installed, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    output = installed.srv(
        "conformance", "run", "--device", NAME, "--level", "L3", "--report", str(report), seconds=1400
    )
    head, *rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert head["versions"].keys() == {"srv", f"srv-{NAME}", "torch"}
    assert [row for row in rows if row["status"] not in ("passed", "skipped")] == [], output
    assert {row["level"] for row in rows if row["status"] == "passed"} == {"L0", "L1", "L2", "L3"}
    shown = re.search(r": (\d+ passed, \d+ skipped)$", (ROOT / "docs" / "plugin-authors.md").read_text(), re.MULTILINE)
    assert shown is not None
    assert f"): {shown[1]}\n" in output, "docs/plugin-authors.md: update the sample run"


def test_the_kit_runs_under_pytest(installed: Installed, tmp_path: Path) -> None:
    """Run it with pytest by the package's name, with the options of the installed pytest plugin."""
    report = tmp_path / "report.jsonl"
    arguments = ("--pyargs", "srv.testing", "--srv-device", NAME, "--srv-level", "L1", "--srv-report", str(report))
    output = run([installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], installed.work)
    rows = [json.loads(line) for line in report.read_text().splitlines()[1:]]
    passed = [row for row in rows if row["status"] == "passed"]
    assert f"{len(passed)} passed" in output
    assert {row["level"] for row in passed} == {"L0", "L1"}
