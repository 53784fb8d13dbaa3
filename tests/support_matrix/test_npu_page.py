"""The support page of NPUs, compared line by line with the published table whose layout it has.

Both are read as text: the page's Markdown and the table's CSV. The code that generates the page is not used.
"""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support" / "npu.md"
PUBLISHED = ROOT / "support_matrix" / "published"
COLUMNS = ["Argument", "Description", "Defaults", "Options", "A2 Supported", "A3 Supported"]
VARIANTS = ("a2", "a3")
# The marks of cells: a word, for planned arguments the platform's declaration, and the level.
MARK = re.compile(
    r"(?:✅ (?:yes|partly|experimental) \(E[45]\)"
    r"|(?:(?:partly|experimental), )?(?:published|declared|contract-tested|simulated) \(E[0-3]\)"
    r"|planned \(platform: (?:yes|partly|experimental|not declared), E[0-5]\)"
    r"|(?:no|not applicable|unknown) \(E[0-5]\))"
)

Row = dict[str, str]


@pytest.fixture(scope="module")
def published() -> list[Row]:
    with (PUBLISHED / "ascend.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sections() -> dict[str, list[Row]]:
    """The rows of each section with a published counterpart, by column."""
    found: dict[str, list[Row]] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and found:
            break  # arguments that are not on the published page follow
        if line.startswith("## "):
            section = line.removeprefix("## ")
            found[section] = []
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found[section].append(dict(zip(COLUMNS, cells, strict=True)))
    return found


def works(mark: str) -> bool:
    """Whether the platform declares support, even if core does not implement the argument."""
    return not re.match(r"no |not applicable |unknown |planned \(platform: not declared", mark)


def test_sections_and_rows_are_the_published_ones_in_their_order(
    sections: dict[str, list[Row]], published: list[Row]
) -> None:
    expected: dict[str, list[str]] = {}
    for row in published:
        expected.setdefault(row["group"], []).append(row["argument"])
    assert len(expected) == 28
    shown = {name: [row["Argument"].split("`")[1] for row in rows] for name, rows in sections.items()}
    assert list(shown.items()) == list(expected.items())


def test_every_line_has_its_columns_and_a_level_for_each_mark(sections: dict[str, list[Row]]) -> None:
    rows = [row for group in sections.values() for row in group]
    assert len(rows) == 255
    for row in rows:
        for column in COLUMNS:
            assert row[column], row
        for variant in VARIANTS:
            assert MARK.fullmatch(row[f"{variant.upper()} Supported"]), row


def test_marks_agree_with_the_published_ones_or_have_a_reason(
    sections: dict[str, list[Row]], published: list[Row]
) -> None:
    reasons = tomllib.loads((PUBLISHED / "ascend_reasons.toml").read_text(encoding="utf-8"))["reason"]
    explained = {flag for reason in reasons for flag in reason["arguments"]}
    rows = [row for group in sections.values() for row in group]
    differing = [
        f"{row['Argument']} on {variant}: theirs is {theirs[variant]}, ours {row[f'{variant.upper()} Supported']}"
        for row, theirs in zip(rows, published, strict=True)
        for variant in VARIANTS
        if works(row[f"{variant.upper()} Supported"]) != (theirs[variant] == "yes")
        and theirs["argument"] not in explained
    ]
    assert differing == []


def test_nothing_is_verified_that_was_not_run_on_the_device(sections: dict[str, list[Row]]) -> None:
    """A check mark needs evidence for the variant in the folder of evidence."""
    ran = {
        variant
        for file in (ROOT / "support_matrix" / "evidence").glob("*.jsonl")
        for variant in VARIANTS
        if f'"variant": "{variant}"' in file.read_text(encoding="utf-8")
    }
    for row in (row for group in sections.values() for row in group):
        for variant in VARIANTS:
            assert "✅" not in row[f"{variant.upper()} Supported"] or variant in ran, row


def test_planned_and_unsupported_have_reasons_with_different_codes(sections: dict[str, list[Row]]) -> None:
    """Every flag whose mark is below a declaration is listed under "Reasons", with the right kind of code."""
    text = PAGE.read_text(encoding="utf-8")
    codes_by_flag: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("- `--"):
            flags, code = line.partition(": ")[0], re.search(r"`\[(\w+)\]`$", line)
            for flag in re.findall(r"`(--[\w-]+)`", flags):
                codes_by_flag.setdefault(flag, set()).add(code.group(1) if code else "")
    for row in (row for group in sections.values() for row in group):
        codes = {code for flag in re.findall(r"`(--[\w-]+)`", row["Argument"]) for code in codes_by_flag.get(flag, ())}
        marks = [row[f"{variant.upper()} Supported"] for variant in VARIANTS]
        assert ("planned" in codes) >= any(mark.startswith("planned") for mark in marks), row
        refused = any(re.match(r"no |not applicable ", mark) for mark in marks)
        assert not refused or codes - {"planned", ""}, row
