"""Text for a terminal: how wide it is, lines that are wrapped for it, and what it must not obey.

It must not know what is printed.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO


def columns(stream: TextIO) -> int | None:
    """The columns of the terminal that shows this stream; None if a program reads it, which wants whole lines."""
    return shutil.get_terminal_size((80, 24)).columns if stream.isatty() else None


def printable(text: str) -> str:
    """A text from outside, with escapes for all characters that a terminal would not print, such as ESC."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def wrapped(text: str, indent: str, width: int | None) -> str:
    """Each line of the text wrapped to `width` columns, with all but its first row indented by `indent` more than it.

    Words longer than a row stay whole. None: nothing is wrapped.
    """
    if width is None:
        return text
    return "\n".join(_wrapped_line(line, indent, width) for line in text.split("\n"))


def _wrapped_line(line: str, indent: str, width: int) -> str:
    margin = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.lstrip(),
        width=width,
        initial_indent=margin,
        subsequent_indent=margin + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
