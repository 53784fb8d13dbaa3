"""`srv plugin new --kind`: every family has a template, and each package passes its own tests as it is."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from srv.cli.families import FAMILIES, Family
from srv.cli.main import main
from srv.cli.plugin import Names, pages, rendered
from srv.testing.conformance.model import read_report

KINDS = tuple(family for family in FAMILIES if family.use)


def files_of(family: Family) -> dict[str, str]:
    return dict(rendered(Names("my_acme", "srv_my_acme", "srv-my-acme", "cpu"), family))


def install(family: Family, folder: Path) -> Path:
    """Make the package of a kind, and the `.dist-info` that an installer would write; returns its folder."""
    name = f"acme_{family.kind.replace('-', '_')}"
    assert main(["plugin", "new", name, "--kind", family.kind, "--into", str(folder)]) == 0
    package = folder / f"srv-{name.replace('_', '-')}"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / f"srv_{name}-{project['version']}.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n{requires}")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return package


def test_every_family_that_can_be_added_to_has_a_template() -> None:
    assert [family.kind for family in FAMILIES if not family.use] == ["platform"]
    for family in KINDS:
        files = files_of(family)
        assert {
            "pyproject.toml",
            "README.md",
            "tests/test_my_acme.py",
            "tests/test_my_acme_installed.py",
        } < files.keys()
        texts = [path for path, text in files.items() if re.search(r"\{\{[a-zA-Z]+\}\}", text) or "PACKAGE" in path]
        assert texts == [], family.kind
        for path, text in files.items():
            assert max(map(len, text.splitlines())) <= 120 or path == "README.md", path
            if path.endswith(".py"):
                ast.parse(text)


@pytest.mark.slow
def test_each_package_passes_its_own_tests(tmp_path: Path) -> None:
    """All in one process, as if they were installed together."""
    packages = [install(family, tmp_path) for family in KINDS]
    path = os.pathsep.join([str(package) for package in packages])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    process = subprocess.run(
        [*command, *(str(package / "tests") for package in packages)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed is not None
    assert int(passed[1]) >= 2 * len(KINDS)
    assert "skipped" not in process.stdout


@pytest.mark.slow
def test_the_conformance_kit_checks_an_added_backend_of_experts(tmp_path: Path) -> None:
    package = install(next(family for family in KINDS if family.kind == "moe-backend"), tmp_path)
    report = tmp_path / "report.jsonl"
    only = ["manifest", "probe", "backends.targets", "platform.starts", "op.experts", "experts.loaded"]
    command = [sys.executable, "-m", "srv", "conformance", "run", "--device", "cpu", "--level", "L2"]
    process = subprocess.run(
        [*command, "--report", str(report), "--only", *only],
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    (loaded,) = (outcome for outcome in read_report(report).outcomes if outcome.check == "experts.loaded")
    assert "experts of acme_moe_backend in float32" in loaded.message


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("sampling-backend --platform cpuu", "acme", "no installed platform has this name"),
        ("tool-format", "qwen", "tool format qwen is there already"),
        ("grammar", "outlines", "grammar backend outlines is there already"),
        ("attention-backend", "native", "attention backend cpu.native is there already"),
        ("moe-backend", "torch_native", "backend of experts cpu.torch_native is there already"),
        ("command", "launch", "command launch is there already"),
        ("weight-loader", "weight", "the generated package already uses this name"),  # the class WeightSource
        ("hooks", "Acme", "it is not a lower-case Python identifier"),
    ],
)
def test_a_name_that_is_taken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, words: str
) -> None:
    assert main(["plugin", "new", name, "--kind", *kind.split(), "--into", str(tmp_path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_the_pages_of_all_families_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "docs", "--all"]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line.startswith("# ")]
    assert len(titles) >= len(pages())
    assert [family.kind for family in FAMILIES if f"`{family.group}`" not in printed] == []
