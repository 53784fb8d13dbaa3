"""No Python process of the tree imports from the folder in which it is started: a model's folder, for example.

`python -m` and `python -c` search the working directory before all installed packages, unless they have `-P`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from args_world import model
from every import every

from srv.models import inspection

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "platforms", "kernels", "plugins", "support_matrix", "ci")
# They start Python as well, without `sys.executable`, and cannot pass `-P`.
OTHER_WAYS = {"multiprocessing", "ProcessPoolExecutor"}


def unsafe_starts(source: str) -> list[int]:
    """The lines that name the interpreter, other than to find its folder or to start it with `-P` or with a script,
    whose own folder it then searches."""
    tree = ast.parse(source)
    safe = set(_safe(tree))
    return [node.lineno for node in ast.walk(tree) if (_is_interpreter(node) and node not in safe) or _other_way(node)]


def _is_interpreter(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"


def _safe(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for first, second in zip(node.elts, node.elts[1:], strict=False):
                if isinstance(second, ast.Call) or (isinstance(second, ast.Constant) and second.value == "-P"):
                    yield first
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Path":
            yield from node.args


def _other_way(node: ast.AST) -> bool:
    match node:
        case ast.Import(names):
            return any(OTHER_WAYS & set(name.name.split(".")) for name in names)
        case ast.ImportFrom(module, names):
            return bool(OTHER_WAYS & {*(module or "").split("."), *(name.name for name in names)})
    return False


def test_every_python_process_is_started_with_a_safe_path() -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts]
    assert len(files) > 500
    unsafe = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in unsafe_starts(path.read_text())]
    assert not unsafe


@every(
    ("source", "lines"),
    [
        ("run([sys.executable, '-P', '-m', 'a'])", []),
        ("Path(sys.executable).parent", []),
        ("run([sys.executable, '-m', 'a'])", [1]),
        ("W = (sys.executable, *options)", [1]),
        ("python = sys.executable", [1]),
        ("run([sys.executable, str(HERE / 'a.py')])", []),
        ("from concurrent.futures import ProcessPoolExecutor", [1]),
        ("import torch.multiprocessing", [1]),
    ],
)
def test_what_counts_as_unsafe(source: str, lines: list[int]) -> None:
    assert unsafe_starts(source) == lines


def test_a_plan_imports_nothing_from_the_folder_it_is_made_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asks transformers; here it imports the first modules only."""
    (tmp_path / "msgspec.py").write_text("open('imported', 'w')")
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv/__init__.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection, "MODULE", "srv.specs")
    inspection.inspect_model(model())
    assert not (tmp_path / "imported").exists()
