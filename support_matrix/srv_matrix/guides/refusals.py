"""The refusal codes, from a file that a test compares with the source."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from srv_matrix.marks import escape, text_of


class Entry(NamedTuple):
    """What a code means, and what to do."""

    means: str
    do: str


class Group(NamedTuple):
    """Codes with one origin."""

    title: str
    intro: str
    codes: dict[str, Entry]


def read_refusals(path: Path) -> list[Group]:
    """The groups of the file, in its order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Group(group["title"], group.get("intro", ""), {code: Entry(*entry) for code, entry in group["codes"].items()})
        for group in table["group"]
    ]


def refusals(path: Path) -> str:
    """One section per group, one row per code. `#CODE` leads to the row."""
    lines: list[str] = []
    for group in read_refusals(path):
        lines += [f"## {group.title}", "", *([group.intro, ""] if group.intro else [])]
        lines += ["| Code | Meaning | What to do |", "| --- | --- | --- |"]
        lines += [
            f'| <span id="{code}"></span>`{code}` | {escape(entry.means)} | {escape(entry.do)} |'
            for code, entry in group.codes.items()
        ]
        lines.append("")
    return text_of(lines)
