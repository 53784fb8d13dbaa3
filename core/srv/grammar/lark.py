"""Texts and patterns in the notation of Lark."""

from __future__ import annotations

import json
import re


def lark_text(text: str) -> str:
    """A string as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def lark_pattern(pattern: str) -> str:
    """A regular expression as a literal of Lark."""
    escaped = re.sub(r"(\\.)|/", lambda match: match.group(1) or r"\/", pattern, flags=re.DOTALL)
    return f"/{escaped}/"
