"""Shared code has no switch between architectures: each one is described by a file of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from every import every

from srv.models.architectures.registry import BUILT_IN

CORE = Path(__file__).resolve().parents[2] / "core" / "srv"
ARCHITECTURES = CORE / "models" / "architectures"
OWN = {ARCHITECTURES / f"{module}.py" for module in BUILT_IN.values()} | {ARCHITECTURES / "registry.py"}
SHARED = [
    path
    for folder in ("models", "quantization", "planning", "worker", "engine", "executor", "sample", "memory")
    for path in sorted((CORE / folder).rglob("*.py"))
    if path not in OWN
]


def names_in(source: str) -> list[str]:
    """The names of architectures, or of their GGUF files, among the strings of a file; docstrings may have them."""
    tree = ast.parse(source)
    names = {*BUILT_IN, *BUILT_IN.values()}
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [text for node, text in _strings(tree) if id(node) not in prose and text in names]


def _strings(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, node.value


def test_a_switch_is_found() -> None:
    planted = (
        'def f(name):\n    """For "LlamaForCausalLM"."""\n    return name == "LlamaForCausalLM" or name in ("qwen2",)'
    )
    assert names_in(planted) == ["LlamaForCausalLM", "qwen2"]


@every("path", SHARED, ids=lambda path: str(path.relative_to(CORE)))
def test_shared_code_names_no_architecture(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8")) == []
