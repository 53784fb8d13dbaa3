"""The code blocks of Markdown pages, and how their commands are tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(?P<language>bash|python)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://localhost:30000"
# Why a command of another program is not run: what it would need.
NOT_RUN = {
    "make": "installs packages; CI runs it",
    "source": "belongs to the shell of the reader",
    "sudo": "needs systemd as root",
    "docker": "needs a container runtime",
}


class Command(NamedTuple):
    """One command of a page. `program`: its first word."""

    page: str
    program: str
    text: str


def blocks(page: Path, language: str) -> list[str]:
    """The texts of the code blocks in one language."""
    return [
        match["text"] for match in _BLOCK.finditer(page.read_text(encoding="utf-8")) if match["language"] == language
    ]


def commands(page: Path) -> Iterator[Command]:
    """The commands of the shell blocks, with continued lines joined."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield Command(page.name, line.split()[0], line.strip())
