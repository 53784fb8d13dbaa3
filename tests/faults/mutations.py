"""The faults that can be drawn for a Python module: each changes one expression or statement, found in its syntax tree.

They change what code does, never what it says: docstrings, annotations, texts of errors and logs, assertions,
decorators, `__repr__` and what only type checkers read are left alone. Some change nothing that can be seen
("equivalent mutants"): the lines before and after are kept so that one can judge.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_LARGEST = 16  # integers above are mostly sizes and times, which one more does not change visibly
_SAID = ("log", "logger", "logging", "warnings", "print")  # messages, or objects whose methods write them
_ASSERTED = "static_assert"  # Triton's
_NOT_RUN = ("__repr__", "__str__")
_NEUTRAL = {"bool": "False", "int": "0", "float": "0.0", "str": '""', "list": "[]", "dict": "{}", "tuple": "()"}


@dataclass(frozen=True)
class Mutation:
    """`kind`: what was done. `line`: where. `before`, `after`: the lines that differ. `source`: all of the module."""

    kind: str
    line: int
    before: str
    after: str
    source: str


def mutations(source: str) -> list[Mutation]:
    """All faults of a module in the order of its lines."""
    text = _Text(source)
    texts = [text.replaced(kind, node, new) for kind, node, new in _changes(ast.parse(source).body)]
    return sorted(texts, key=lambda mutation: (mutation.line, mutation.kind))


def draw(source: str, random_: random.Random) -> Mutation | None:
    """One fault, its kind first: there are many more constants than conditions. None if there is nothing to change."""
    by_kind: dict[str, list[Mutation]] = {}
    for mutation in mutations(source):
        by_kind.setdefault(mutation.kind, []).append(mutation)
    return random_.choice(by_kind[random_.choice(sorted(by_kind))]) if by_kind else None


def commented(source: str, line: int) -> str:
    """The source with a comment before this line, or at its end if no comment can be there: it behaves as before."""
    lines = source.splitlines(keepends=True)
    changed = "".join([*lines[: line - 1], "# Nothing is planted here.\n", *lines[line - 1 :]])
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            return changed
    except SyntaxError:
        pass
    return f"{source}# Nothing is planted here.\n"


class _Text:
    """A source in which the text of a node can be replaced. New text that ends its line is put before the node."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def replaced(self, kind: str, node: ast.expr | ast.stmt, new: str) -> Mutation:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = begin if new.endswith("\n") else self._starts[node.end_lineno - 1] + node.end_col_offset
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        changed = new.replace("\n", "\n" + " " * node.col_offset).encode()
        return Mutation(
            kind=kind,
            line=node.lineno,
            before=self._data[first:last].decode().rstrip("\n"),
            after=(self._data[first:begin] + changed + self._data[end:last]).decode().rstrip("\n"),
            source=(self._data[:begin] + changed + self._data[end:]).decode(),
        )


_Change = tuple[str, ast.expr | ast.stmt, str]


def _changes(body: list[ast.stmt]) -> Iterator[_Change]:
    """Of each statement: its kind, the node whose text is replaced, and the new text."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name not in _NOT_RUN:
                yield from _returned_early(statement)
                for default in [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]:
                    yield from _of_expression(default)
                yield from _changes(statement.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Raise() | ast.Assert():
                pass
            case ast.If(test=test) if _is_for_types_or_scripts(test):
                yield from _changes(statement.orelse)
            case ast.Expr(value=ast.Call() as call):
                if not _is_message(call):
                    yield "drop a call", statement, "pass"
                    yield from _of_expression(call)
            case ast.AnnAssign(value=value):
                if value is not None:
                    yield from _of_expression(value)
            case ast.ClassDef():
                yield from _changes(statement.body)
            case _:
                if isinstance(statement, ast.If | ast.While):
                    yield from _negated(statement.test)
                yield from _of_children(statement)


def _of_children(node: ast.AST) -> Iterator[_Change]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _changes([child])
        elif isinstance(child, ast.expr):
            yield from _of_expression(child)
        else:  # a handler, an item of `with`, a keyword, a comprehension, a case
            if isinstance(child, ast.comprehension):
                for condition in child.ifs:
                    yield from _negated(condition)
            yield from _of_children(child)


def _of_expression(node: ast.expr) -> Iterator[_Change]:
    match node:
        case ast.JoinedStr():
            return
        case ast.Call() if _is_message(node):
            return
        case ast.Compare(ops=[op]):
            changed = ast.Compare(node.left, [_COMPARED[type(op)]()], node.comparators)
            yield "change a comparison", node, _unparsed(changed)
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value <= _LARGEST:
            yield "one more", node, str(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "drop `not`", node, _unparsed(operand)
        case ast.BoolOp(op=op, values=values):
            yield "swap and/or", node, _unparsed(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.IfExp(test=test):
            yield from _negated(test)
        case ast.Call(args=arguments):
            yield from _swapped(node, arguments)
        case _:
            pass
    yield from _of_children(node)


def _negated(condition: ast.expr) -> Iterator[_Change]:
    if not isinstance(condition, ast.UnaryOp | ast.Compare):  # those have changes of their own
        yield "negate a condition", condition, f"(not {_unparsed(condition)})"


def _swapped(call: ast.Call, arguments: list[ast.expr]) -> Iterator[_Change]:
    """Two neighbours that are both names, both attributes or both constants of one type."""
    for index, (left, right) in enumerate(itertools.pairwise(arguments)):
        if _kind(left) is not None and _kind(left) == _kind(right) and ast.dump(left) != ast.dump(right):
            order = [*arguments[:index], right, left, *arguments[index + 2 :]]
            yield "swap two arguments", call, ast.unparse(ast.Call(call.func, order, call.keywords))


def _kind(node: ast.expr) -> object:
    match node:
        case ast.Name() | ast.Attribute():
            return type(node)
        case ast.Constant(value=value):
            return type(value)
        case _:
            return None


def _returned_early(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Change]:
    """A return before the first of several statements. One that returns or raises has other changes, or none."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if len(body) > 1 and not getattr(body[0], "decorator_list", []):
        returns = ast.unparse(function.returns).partition("[")[0] if function.returns else ""
        value = _NEUTRAL.get(returns, "" if returns == "None" or _is_generator(function) else "None")
        yield "return early", body[0], f"return {value}".rstrip() + "\n"


def _is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _is_message(call: ast.Call) -> bool:
    """Whether the call only logs, warns or asserts."""
    path = ast.unparse(call.func).split(".")
    return path[-1] == _ASSERTED or any(name in _SAID for name in path)


def _is_for_types_or_scripts(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id in ("TYPE_CHECKING", "__name__") for node in ast.walk(test))


def _unparsed(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
