"""Every argument that can be set has an effect, which is tested by a test in the table of `argument_effects`.

The tests are looked up in their files, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from argument_effects import EFFECTS, SERVER
from every import every

from srv.args.config import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
UNDECLARED_FLAGS = frozenset({"config"})  # flags of the command line without a declaration


def faults(effects: Mapping[str, str], needed: frozenset[str], planned: frozenset[str]) -> list[str]:
    """The faults of a table of effects, one sentence each."""
    problems = [f"{name} is not planned and has no test" for name in sorted(needed - effects.keys())]
    for name, where in effects.items():
        if name in planned:
            problems.append(f"{name} is planned: it can have no effect")
        elif name not in needed:
            problems.append(f"{name} is not an argument")
        if not _exists(where):
            problems.append(f"{name}: there is no test {where}")
    return problems


def _exists(where: str) -> bool:
    """Whether "path::function" is a test function of a test module."""
    path, _, function = where.partition("::")
    file = ROOT / path
    if not (function.startswith("test_") and file.name.startswith("test_") and file.is_file()):
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and node.name == function for node in ast.parse(file.read_text()).body)


def test_every_argument_has_a_test_of_its_effect() -> None:
    planned = frozenset(name for name, argument in ARGUMENTS.items() if argument.arg.planned)
    assert faults(EFFECTS, (ARGUMENTS.keys() - planned) | UNDECLARED_FLAGS, planned) == []


@every(
    ("effects", "fault"),
    [
        ({}, "port is not planned and has no test"),
        ({"port": SERVER + "test_port", "pp_size": SERVER + "test_port"}, "pp_size is planned"),
        ({"port": SERVER + "test_port", "prot": SERVER + "test_port"}, "prot is not an argument"),
        ({"port": SERVER + "test_prot"}, "port: there is no test"),
        ({"port": SERVER + "running"}, "port: there is no test"),
        ({"port": "tests/e2e/test_nowhere.py::test_port"}, "port: there is no test"),
    ],
)
def test_faults_of_a_table(effects: dict[str, str], fault: str) -> None:
    (only,) = faults(effects, frozenset({"port"}), frozenset({"pp_size"}))
    assert only.startswith(fault)
