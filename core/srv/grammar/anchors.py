"""Regular expressions without anchors, for libraries that match whole texts and pass over `^` and `$` within a pattern.

JSON Schema looks for a pattern anywhere in a text, so that any text may stand where an alternative has no anchor.
"""

from __future__ import annotations

import re

from srv.errors import GrammarError

_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|^$]|[^\\\[()|^$]+|.", re.DOTALL)
_ANCHORS = frozenset({"^", "$", r"\A", r"\Z", r"\z", r"\b", r"\B"})


def whole(pattern: str, anything: str = "") -> str:
    """The pattern of the whole texts in which `pattern` is found. `anything`: matches any text; "": none comes before
    or after what the pattern matches. Raises GrammarError for an anchor that is not at an end of an alternative.
    """
    patterns = [_without_anchors(parts, pattern, anything) for parts in _alternatives(pattern)]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def _alternatives(pattern: str) -> list[list[str]]:
    """The parts of each alternative: escapes, sets, parentheses, anchors, and the texts between them."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    return alternatives


def _without_anchors(parts: list[str], pattern: str, anything: str) -> str:
    begin, end = 0, len(parts)
    while begin < end and parts[begin] == "^":
        begin += 1
    while end > begin and parts[end - 1] == "$":
        end -= 1
    body = parts[begin:end]
    if not _ANCHORS.isdisjoint(body):
        raise GrammarError(f"anchors within a pattern cannot be enforced, only those at its ends: {pattern[:40]!r}")
    return f"{'' if begin else anything}{''.join(body)}{'' if end < len(parts) else anything}"
