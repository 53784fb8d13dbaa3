"""Reads literals of Python as data. Nothing is evaluated, and nothing that is written is left out."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

NOT_READABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
_CONSTANTS = {"true": True, "false": False, "null": None}  # as JSON has them


def expression(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises one of NOT_READABLE, also if it has comments."""
    if "#" in text:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        if any(token.type == tokenize.COMMENT for token in tokens):
            raise ValueError("a comment is no data")
    return ast.parse(text, mode="eval").body


def literal(node: ast.expr) -> Any:
    """The value of a literal, with the constants of JSON too. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [literal(item) for item in items]
        case ast.Dict(keys, values):
            read = {literal(key): literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
            if len(read) == len(values) and all(isinstance(key, str) for key in read):
                return read
    raise ValueError("not a literal")
