"""What stands at the end of a page: the reasons of its cells as footnotes, and the runs that its cells show.

A page has one of each. It asks for the mark of a cell, and at its end for the lines of all that it asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from srv_matrix.marks import escape, look_of, shorten
from srv_matrix.records import LEVEL_3_WORDS, SIMULATED, Evidence, Level, Record

_HOW = {Level.E3: SIMULATED, Level.E4: "run on the device", Level.E5: "run on the device, fast"}
_SHORT_COMMIT = 8
_REFUSED = re.compile(r"not (?!yet: )[^:]*: (?=[a-z])")  # the values that a reason is for
_LONGEST_REASON = 200  # of a footnote; the site and `srv matrix show` have the whole text


class Run(NamedTuple):
    """Evidence of one kind that was recorded in one run on one device."""

    variant: str
    how: str
    run: str
    date: str
    device: str
    versions: str


class PageNotes:
    """The footnotes and runs of one page. `platforms`: whether runs name their platform, as well as the variant."""

    def __init__(self, *, platforms: bool = False) -> None:
        self._platforms = platforms
        self._labels: dict[tuple[str, str], str] = {}
        self._runs: dict[Run, str] = {}

    def cell(self, record: Record | None) -> str:
        """The glyph of a cell, and the name of the run that it is based on ("✓ e1"); without its reason."""
        if record is None:
            return "not in srv"
        ran = newest_run(record) if record.status.works else None
        return look_of(record).glyph + ("" if ran is None else f" {self._run(ran)}")

    def footnote(self, code: str, reason: str) -> str:
        """The mark of a reason; the same for equal reasons, and "" without one."""
        if not reason:
            return ""
        key = code, shorten(reason, _LONGEST_REASON)
        return self._labels.setdefault(key, f"[^{len(self._labels) + 1}]")

    def lines(self) -> Iterator[str]:
        """The end of the page."""
        if self._runs:
            yield from ("## Evidence", "", "| | Variant | How | Run | Date | Device | Versions |")
            yield "| --- | --- | --- | --- | --- | --- | --- |"
            for run, name in self._runs.items():
                yield f"| {name} | " + " | ".join(escape(text) for text in run) + " |"
            yield ""
        for (code, reason), label in self._labels.items():
            end = "" if reason.endswith((".", "…")) else "."
            yield f"{label}: " + (f"`{code}`: " if code else "") + escape(reason) + end

    def _run(self, evidence: Evidence) -> str:
        variant = f"{evidence.platform}:{evidence.variant}" if self._platforms else evidence.variant
        how = evidence.note or _HOW.get(evidence.level, evidence.level.word)
        run = Run(variant, how, run_name(evidence), evidence.date, evidence.device, versions_of(evidence))
        return self._runs.setdefault(run, f"e{len(self._runs) + 1}")


def run_name(evidence: Evidence) -> str:
    """The tested commit; of a conformance report, the command that wrote it."""
    return evidence.commit[:_SHORT_COMMIT] or evidence.test.partition(":")[0]


def versions_of(evidence: Evidence) -> str:
    """Of the platform's package, torch, the vendor's packages, and the simulator."""
    versions = [f"{name} {version}" for name, version in evidence.versions.items()]
    texts = [*evidence.plugin_version.split(", "), *versions, *evidence.simulator.split(", ")]
    return ", ".join(dict.fromkeys(filter(None, texts)))  # a simulator may be the platform's own package


def newest_run(record: Record) -> Evidence | None:
    """The newest of the strongest evidence for a cell; of an argument, the oldest of that of its weakest values."""
    if record.values:
        weakest = [value for value in record.weakest if value.word == record.word]
        runs = [ran for value in weakest if (ran := newest_run(value)) is not None]
        return min(runs, key=lambda run: (run.date, run.commit), default=None)
    return max(record.ran, key=lambda line: (_strength(line), line.date, line.commit), default=None)


def _strength(evidence: Evidence) -> int:
    """How much evidence of one level says: without a limitation more than with one."""
    return (
        LEVEL_3_WORDS.index(evidence.note)
        if evidence.note in LEVEL_3_WORDS
        else len(LEVEL_3_WORDS) - bool(evidence.note)
    )


class Column(NamedTuple):
    """The cells of variants of a platform that agree in every row."""

    platform: str
    variants: tuple[str, ...]
    cells: tuple[str, ...]


def columns(cells: Mapping[tuple[str, str], Sequence[str]]) -> list[Column]:
    """One column for variants that agree. `cells`: by platform and variant, in the order of rows."""
    by_texts: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (platform, variant), texts in cells.items():
        by_texts.setdefault((platform, tuple(texts)), []).append(variant)
    return [Column(platform, tuple(variants), texts) for (platform, texts), variants in by_texts.items()]


def general_reason(record: Record) -> str:
    """The reason of a cell without the names of its variant and values, so that those of several are one footnote."""
    text = record.reason.replace(f", not {record.variant}", "")
    text = re.sub(rf"\b{re.escape(record.variant)} has\b", "this variant has", text)
    if ". Not " not in text and (refused := _REFUSED.match(text)):
        text = text[refused.end() :]
    return text.replace(f" (constraint of platform {record.platform})", "")
