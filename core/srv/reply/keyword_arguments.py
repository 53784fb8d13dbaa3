"""The grammar of a list of named values: required ones first, so that one without a comma before it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Format = dict[str, Any]  # of a structural tag


def keyword_arguments(
    values: Mapping[str, Format], required: Mapping[str, bool], sign: str, comma: str
) -> list[Format]:
    """The formats of these arguments, one after another; without a required one, any may be the first.

    sign: between a name and its value. comma: between two arguments.
    """
    values = {name: values[name] for name in sorted(values, key=lambda name: not required[name])}
    if not values:
        return []
    tags = [tag(f"{name}{sign}", value, "") for name, value in values.items()]
    behind = [tag(f"{comma}{name}{sign}", value, "") for name, value in values.items()]
    behind = [
        argument if required[name] else optional([argument]) for name, argument in zip(values, behind, strict=True)
    ]
    firsts = [{"type": "sequence", "elements": [first, *behind[index + 1 :]]} for index, first in enumerate(tags)]
    if not any(required[name] for name in values):
        firsts = [{"type": "or", "elements": [*firsts[:-1], optional(tags[-1:])]}]
    return firsts[:1]


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def optional(tags: list[Format]) -> Format:
    """One of these, or none."""
    return {"type": "tags_with_separator", "tags": tags, "separator": "", "stop_after_first": True}
