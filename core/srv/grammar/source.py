"""What a request asks its output to follow, before it is compiled.

Owns the kinds of sources and their canonical text. Must not know request bodies, or how a grammar is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of `json_object`


class GrammarSource(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint on the output.

    `text`: a JSON schema, a regular expression, a JSON array of strings, a grammar (Lark, or EBNF with a rule `root`),
    or a structural tag as JSON. `param`: the request's field with it, for errors. `begins_after`: the constraint begins
    after the first occurrence of this text in the output, such as the end of the model's reasoning ("": at once).
    `whitespace_pattern`: a regular expression for the white space between JSON tokens (None: the server's).
    """

    kind: Kind
    text: str
    param: str
    begins_after: str = ""
    whitespace_pattern: str | None = None


def from_json_schema(
    schema: Mapping[str, Any] | bool | str,
    *,
    param: str,
    whitespace_pattern: str | None = None,
) -> GrammarSource:
    """JSON values that follow a schema, given as a value or as its JSON text."""
    text = schema if isinstance(schema, str) else _json(schema)
    return GrammarSource(kind="json_schema", text=text, param=param, whitespace_pattern=whitespace_pattern)


def from_structural_tag(tag: Mapping[str, Any] | str, *, param: str, begins_after: str = "") -> GrammarSource:
    """Free text with constrained parts. `tag`: {"type": "structural_tag", ...}, as a value or as its JSON text.

    Calls of tools between markers are such parts; see `srv.grammar.structural`.
    """
    text = tag if isinstance(tag, str) else _json(tag)
    return GrammarSource(kind="structural_tag", text=text, param=param, begins_after=begins_after)


def from_choice(choices: Sequence[str], *, param: str) -> GrammarSource:
    """One of several texts."""
    return GrammarSource(kind="choice", text=_json(list(choices)), param=param)


def _json(value: object) -> str:
    # The order of properties is the order in which they are generated.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
