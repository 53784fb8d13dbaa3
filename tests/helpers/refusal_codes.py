"""Find the refusal codes that the source can emit: strings that are passed as, or bound to, something named `code`.

Read from the syntax tree, so that a code which no test provokes is found as well. A function or a class with a
parameter `code` makes each constant that a call passes there a code; so does an assignment or a default of that name.
Functions that return `tuple[str, str]` return a code with its message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

NAMES = {"code", "reason_code"}
CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
IN_TEXT = re.compile(r"\. ?\[([a-z][a-z0-9_]*)\]")  # messages that are written whole: "Free memory. [out_of_memory]"
Places = dict[str, int | None]  # where a function or class takes its code; None: it takes none
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One parsed file: the constants of its top level, what it defines, and from where it imports names."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.nodes = list(ast.walk(self.tree))
        self.constants: dict[str, ast.expr] = {}
        self.imported: dict[str, str] = {}
        self.places: Places = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                self.constants |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        for statement in self.nodes:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                self.imported |= {alias.asname or alias.name: statement.module for alias in statement.names}
            elif isinstance(statement, ast.ClassDef | _Function):
                names = _parameters(statement)
                position = next((names.index(name) for name in names if name in NAMES), None)
                if self.places.get(statement.name) is None:
                    self.places[statement.name] = position


def codes_in(folders: Iterable[Path]) -> dict[str, set[str]]:
    """Every code, with the names of the files that mention it. Files of tests are left out."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts]
    modules = {path: Module(path) for path in paths}
    by_name = {
        ".".join(parts[at:]): module
        for path, module in modules.items()
        for parts in [path.with_suffix("").parts]
        for at in range(len(parts))
    }
    anywhere = {name: at for other in modules.values() for name, at in other.places.items() if at is not None}
    paths_by_code: dict[str, set[str]] = {}
    for path, module in modules.items():
        places = _visible(module, by_name, anywhere)
        for node in module.nodes:
            for value in _code_values(node, places):
                for code in _strings(value, module):
                    paths_by_code.setdefault(code, set()).add(path.as_posix())
    return paths_by_code


def _parameters(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return _parameters(member)
        return [
            member.target.id
            for member in node.body
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
        ]
    assert isinstance(node, _Function)
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _visible(module: Module, modules: Mapping[str, Module], anywhere: Places) -> Places:
    """The functions and classes that a module can call by name: its own, imported ones, methods of all modules."""
    imported: Places = {}
    for name, source in module.imported.items():
        origin = modules.get(source)
        if origin is not None and name in origin.places:
            imported[name] = origin.places[name]
    return anywhere | imported | module.places


def _code_values(node: ast.AST, places: Places) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg in NAMES)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        at = places.get(called)
        if at is not None and at < len(node.args):
            yield node.args[at]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (value for name, value in _pairs(target, node.value) if name.lower() in NAMES)
    elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        if node.target.id.lower() in NAMES:
            yield node.value
    elif isinstance(node, _Function):
        arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        for argument, default in zip(arguments, node.args.defaults, strict=True):
            if argument.arg in NAMES:
                yield default
        if node.returns is not None and "tuple[str, str]" in ast.unparse(node.returns):
            for statement in ast.walk(node):
                if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                    yield from (
                        one for one in statement.value.elts if isinstance(one, ast.Constant) and "_" in str(one.value)
                    )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (ast.Constant(code) for code in IN_TEXT.findall(node.value))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names of an assignment with their values: `code, text = a or ("b", "c")` too."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        choices = value.values if isinstance(value, ast.BoolOp) else [value]
        for alternative in choices:
            if isinstance(alternative, ast.Tuple):
                yield from (
                    pair for one, two in zip(target.elts, alternative.elts, strict=False) for pair in _pairs(one, two)
                )


def _strings(value: ast.expr, module: Module) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and CODE.fullmatch(value.value):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from (*_strings(value.body, module), *_strings(value.orelse, module))
    elif isinstance(value, ast.BoolOp):
        for element in value.values:
            yield from _strings(element, module)
    elif isinstance(value, ast.Name) and value.id in module.constants:
        yield from _strings(module.constants[value.id], module)
