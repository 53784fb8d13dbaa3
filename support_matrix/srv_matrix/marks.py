"""The words that cells print, and the little that all pages share. A cell's mark is never greener than its evidence."""

from __future__ import annotations

from collections.abc import Iterable

from srv_matrix.records import Record, Status

MADE = "<!-- Made by `srv matrix generate` (make matrix). Do not edit. -->"
WORDS = {
    Status.SUPPORTED: "yes",
    Status.LIMITED: "partly",
    Status.EXPERIMENTAL: "experimental",
    Status.UNKNOWN: "unknown",
    Status.PLANNED: "planned",
    Status.UNSUPPORTED: "no",
    Status.NOT_APPLICABLE: "not applicable",
}


def mark(record: Record | None) -> str:
    """What a cell prints: its status in a word and the level of its evidence; a yes only if it was run."""
    if record is None:
        return "not in srv"
    level, word = record.level, WORDS[record.status]
    if level is None:
        return "not run (none)" if record.status.works else f"{word} (none)"
    if record.status is Status.PLANNED:
        declared = f"platform: {WORDS[record.declared]}" if record.declared.works else "platform: silent"
        return f"planned ({declared}, {level.name})"
    if not record.status.works:
        return f"{word} ({level.name})"
    if record.verified:
        note = f", {record.note}" if record.note else ""
        return f"✅ {word} ({level.name}{note})"
    known = level.word if record.status is Status.SUPPORTED else f"{word}, {level.word}"
    return f"{known} ({level.name})"


def escape(text: str) -> str:
    """Text that is safe in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def text_of(lines: Iterable[str]) -> str:
    """A page of these lines, with one line break at its end."""
    return "\n".join(lines).rstrip("\n") + "\n"
