"""What a request asks its output to follow, before it is compiled.

Owns the kinds of sources and their canonical text. Must not know request bodies, or how a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from srv.grammar.written import dump

Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of `json_object`


class GrammarSource(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint on the output.

    `text`: a JSON schema, a regular expression, a JSON array of strings, a grammar (Lark, or EBNF with a rule `root`),
    or a structural tag as JSON. `param`: the request's field with it, for errors. `begins_after`: the constraint begins
    after the first occurrence of this text in the output, such as the end of the model's reasoning ("": at once).
    `whitespace_pattern`: a regular expression for the white space between JSON tokens (None: the server's). `strict`: a
    schema of which something cannot be enforced is refused; else that part is left out. `left_out`: what the text does
    not have of such a schema.
    """

    kind: Kind
    text: str
    param: str
    begins_after: str = ""
    whitespace_pattern: str | None = None
    strict: bool = True
    left_out: tuple[str, ...] = ()


def from_json_schema(
    schema: Mapping[str, Any] | bool | str,
    *,
    param: str,
    whitespace_pattern: str | None = None,
    strict: bool = True,
) -> GrammarSource:
    """JSON values that follow a schema, given as a value or as its JSON text."""
    text = schema if isinstance(schema, str) else dump(schema)
    return GrammarSource(
        kind="json_schema", text=text, param=param, whitespace_pattern=whitespace_pattern, strict=strict
    )


def from_structural_tag(tag: Mapping[str, Any] | str, *, param: str, begins_after: str = "") -> GrammarSource:
    """Free text with constrained parts. `tag`: {"type": "structural_tag", ...}, as a value or as its JSON text.

    Calls of tools between markers are such parts; see `srv.grammar.structural`.
    """
    text = tag if isinstance(tag, str) else dump(tag)
    return GrammarSource(kind="structural_tag", text=text, param=param, begins_after=begins_after)


def from_choice(choices: Sequence[str], *, param: str) -> GrammarSource:
    """One of several texts."""
    return GrammarSource(kind="choice", text=dump(list(choices)), param=param)
