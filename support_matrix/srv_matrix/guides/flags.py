"""The flags of another engine and what they become: the tables of `srv args translate --table`, as Markdown."""

from __future__ import annotations

from srv.args.dialects import read_dialect
from srv_matrix.marks import escape, text_of


def flags(engine: str) -> str:
    """One table of all flags of `engine`, which is one that `srv args translate --from` accepts."""
    rows = read_dialect(engine).rows
    lines = [f"{sum(not row.refused for row in rows)} of {len(rows)} flags have an equivalent.", ""]
    lines += ["| Flag | In srv | Note |", "| --- | --- | --- |"]
    for row in rows:
        flag_names = "<br>".join(f"`{flag}`" for flag in row.flags)
        ours = "<br>".join(f"`--{name.replace('_', '-')}`" for name in row.targets) or (
            "" if row.refused else "not needed"
        )
        note = f"{row.refused}. {row.remedy}" if row.refused else row.note
        lines.append(f"| {flag_names} | {ours} | {escape(note)} |")
    return text_of(lines)
