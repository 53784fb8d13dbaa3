"""CI runners: workflows call only ci/platform.sh, for existing platforms, and its exit status is as documented.

Its behaviour for an available device is tested in `test_conformance_platforms.py`.

Exit status: 0 success, 1 a failure, 2 an invalid command line, 3 the hardware is missing and no evidence is added.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from every import every
from letters_model import write_accepted_model

from srv.platform.registry import find_platforms

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci" / "platform.sh"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CALL = re.compile(r"ci/platform\.sh (--quick )?(?P<name>[a-z][a-z0-9_]*)(:(?P<variant>\w+))?")
ACTIONS = ("actions/checkout@", "actions/setup-python@", "actions/upload-artifact@")
MISSING = 3
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

sys.path.insert(0, str(ROOT / "ci"))
import platform_state  # noqa: E402 - a script in ci/, which is not a package


def job_of(workflow: Path) -> dict[str, Any]:
    """The only job of a workflow."""
    (job,) = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    assert isinstance(job, dict)
    return job


def platform_sh(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT
    )


def evidence() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (ROOT / "support_matrix" / "evidence").iterdir()}


def test_there_is_a_runner_for_each_platform_and_npu_generation() -> None:
    assert {path.stem for path in WORKFLOWS} == {"cpu", "cuda", "rocm", "npu-a2", "npu-a3", "xpu"}


@every("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_calls_only_the_script_on_a_runner_of_its_platform(workflow: Path) -> None:
    job = job_of(workflow)
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert len(commands) == 1
    call = CALL.fullmatch(commands[0])
    assert call is not None, commands[0]
    assert all(step.get("uses", ACTIONS[0]).startswith(ACTIONS) for step in job["steps"])
    manifest = find_platforms()[call["name"]].loaded
    assert call["variant"] is None or call["variant"] in manifest.variants
    label = "-".join(filter(None, (call["name"], call["variant"])))
    assert workflow.stem == label
    assert job["runs-on"] == "ubuntu-24.04" if label == "cpu" else job["runs-on"] == ["self-hosted", label]


@every(
    "arguments",
    [[], ["--fast", "cpu"], ["cpu", "toy"], ["--quick", "cpu", "--tests"], ["--tests", "tests/core", "cpu"]],
)
def test_invalid_command_line_prints_the_usage(arguments: list[str]) -> None:
    process = platform_sh(*arguments, seconds=20)
    assert process.returncode == 2
    assert "ci/platform.sh [--quick [--tests PATH]...] NAME[:VARIANT]" in process.stderr
    assert "Exit status" in process.stderr


def test_missing_hardware_is_reported_and_adds_no_evidence() -> None:
    """XPU hosts have a render node; if this host has one, the platform itself gives the reason."""
    before = evidence()
    process = platform_sh("xpu", seconds=200)
    assert process.returncode == MISSING, process.stdout + process.stderr
    assert "xpu is missing; nothing is tested and no evidence is added: " in process.stdout
    assert "conformance" not in process.stdout
    assert evidence() == before


def doctor_json(**platform: Any) -> dict[str, Any]:
    """The JSON of `srv doctor --device some`."""
    known = {
        "available": True,
        "simulated": False,
        "reason": "no driver",
        "remedy": "Install it",
        "code": "x",
        **platform,
    }
    choice = {"asked": "some", "platform": "some", "because": "asked", "remedy": ""}
    return {"platforms": [known], "choice": choice, "can_start": known["available"]}


@every(
    ("doctor", "status", "message"),
    [
        (doctor_json(), 0, "hardware"),
        (doctor_json(simulated=True), 0, "simulated"),
        (
            doctor_json(available=False, code="driver_missing"),
            3,
            "no evidence is added: no driver. Install it [driver_missing]",
        ),
        (doctor_json(available=False, code="not_implemented"), 3, "nothing is tested"),
        (doctor_json(available=False, code="probe_crashed"), 1, "the plugin of some is at fault"),
        ({**doctor_json(), "can_start": False}, 1, "no server can start on it"),
        ({**doctor_json(), "platforms": []}, 1, "cannot be tested"),
        (
            {**doctor_json(), "choice": {**doctor_json()["choice"], "platform": None, "because": "here is a3"}},
            3,
            "here is a3",
        ),
    ],
)
def test_missing_hardware_is_distinguished_from_a_fault(doctor: dict[str, Any], status: int, message: str) -> None:
    outcome, line = platform_state.verdict(doctor)
    assert outcome == status
    assert message in line


def test_only_missing_requirements_are_installed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project.optional-dependencies]\nfull = ["packaging>=1"]\nempty = ["no-such-package>=1"]\n'
    )
    plugin = tmp_path / "plugins" / "mine"
    plugin.mkdir(parents=True)
    (plugin / "pyproject.toml").write_text('[project.entry-points."srv.platforms"]\nmine = "mine:MANIFEST"\n')
    assert platform_state.to_install("full", tmp_path) == []
    assert platform_state.to_install("empty", tmp_path) == ["-e", f"{tmp_path}[empty]"]
    assert platform_state.to_install("mine", tmp_path) == ["-e", str(plugin)]
    assert platform_state.to_install("cpu", tmp_path) == []


def test_what_the_evidence_tests_import_is_installed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the platform: one with an extra of its own, a plugin from elsewhere, a simulator."""
    (tmp_path / "pyproject.toml").write_text(
        '[project.optional-dependencies]\nmine = ["vendor-software"]\ntest = ["packaging>=1", "no-such-package>=1"]\n'
    )
    simulator = tmp_path / "plugins" / "mine_simulator"
    simulator.mkdir(parents=True)
    (simulator / "pyproject.toml").write_text('[project]\nname = "no-such-simulator"\n')
    assert platform_state.to_install("mine", tmp_path) == ["-e", f"{tmp_path}[mine,test]"]
    assert platform_state.to_install("other", tmp_path) == ["-e", f"{tmp_path}[test]"]
    monkeypatch.setenv("SRV_MINE_SIMULATOR", "one")
    assert platform_state.to_install("mine", tmp_path) == ["-e", f"{tmp_path}[test]", "-e", str(simulator)]


def test_the_extra_for_tests_has_what_the_evidence_tests_import() -> None:
    """What an environment with srv and this extra alone lacks, the evidence tests must not import."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    own_modules = {"srv", "srv_matrix", *(path.stem for path in (ROOT / "tests" / "helpers").glob("*.py"))}
    installed = {name.replace("-", "_") for name in map(_name, [*DEPENDENCIES, *extras["test"]])}
    script = SCRIPT.read_text()
    (files,) = re.findall(r"any_device_tests=\((.+\.py)\)", script)
    helpers = ("letters_model", "e2e_support")
    files = [
        *files.split(),
        "tests/e2e/conftest.py",
        "tests/conftest.py",
        *(f"tests/helpers/{helper}.py" for helper in helpers),
    ]
    for file in files:
        tops = {name.partition(".")[0] for name in _imported(ROOT / file)}
        assert tops - sys.stdlib_module_names - own_modules - installed == set(), file


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower()


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


TALL = """
import dataclasses
from srv.platform.facts import Requires, Unfit
from srv_toy_device.manifest import MANIFEST as TOY

def check(context):
    short = context.model is not None and context.model.head_dim % 64
    return Unfit(("its kernels need heads of a multiple of 64",)) if short else Requires()

ATTENTION = tuple(dataclasses.replace(each, check=check) for each in TOY.facts.backends["attention"])
FACTS = dataclasses.replace(TOY.facts, backends={**TOY.facts.backends, "attention": ATTENTION})
MANIFEST = dataclasses.replace(TOY, name="tall", facts=FACTS)
"""


def test_evidence_tests_use_a_model_that_the_platform_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tall.py").write_text(TALL)
    info = tmp_path / "tall-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tall\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[srv.platforms]\ntall = tall:MANIFEST\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write_accepted_model(tmp_path / "model", "tall")
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 64
    assert json.loads((write_accepted_model(folder, "cpu") / "config.json").read_text())["head_dim"] == 16


def test_simulator_replaces_the_vendors_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nmine = ["vendor-software"]\n')
    simulator = tmp_path / "plugins" / "mine_simulator"
    simulator.mkdir(parents=True)
    (simulator / "pyproject.toml").write_text('[project]\nname = "no-such-simulator"\n')
    assert platform_state.to_install("mine", tmp_path) == ["-e", f"{tmp_path}[mine]"]
    monkeypatch.setenv("SRV_MINE_SIMULATOR", "one")
    assert platform_state.to_install("mine", tmp_path) == ["-e", str(simulator)]
