"""The support page of NPUs, compared line by line with the published table whose layout it has.

Both are read as text: the page's Markdown, as it would be generated now, and the table's CSV.
"""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest
from committed_matrix import committed_matrix

from srv.args.config import ARGUMENTS
from srv_matrix.argument_page import argument_page

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "support_matrix" / "published"
pytestmark = pytest.mark.slow  # judges the committed matrix

COLUMNS = ["Argument", "Description", "Defaults", "Options", "A2 Supported", "A3 Supported"]
VARIANTS = ("a2", "a3")
# A sign, the run that it is based on, and the footnote of its reason.
MARK = re.compile(r"([✓◎○]|[◐△][✓◎]?|[…✕–?])(?: (e\d+))?(\[\^\d+\])?")
FOOTNOTE = re.compile(r"\[\^\d+\]")

Row = dict[str, str]


@pytest.fixture(scope="module")
def published() -> list[Row]:
    with (PUBLISHED / "ascend.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def page() -> str:
    shown = committed_matrix()
    return argument_page(shown, next(manifest for manifest in shown.manifests if manifest.name == "npu"))


@pytest.fixture(scope="module")
def sections(page: str) -> dict[str, list[Row]]:
    """The rows of each section, by column."""
    by_section: dict[str, list[Row]] = {}
    section = ""
    for line in page.partition("\n## Evidence")[0].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            by_section[section] = []
        elif line.startswith("`--"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
            by_section[section].append(dict(zip(COLUMNS, cells, strict=True)))
    return by_section


def works(mark: str) -> bool:
    """Whether the platform declares support, even if core does not implement the argument."""
    return mark[0] not in "✕–?"


def test_sections_and_rows_are_the_published_ones_in_their_order(
    sections: dict[str, list[Row]], published: list[Row]
) -> None:
    expected: dict[str, list[str]] = {}
    for row in published:
        expected.setdefault(row["group"], []).append(row["argument"])
    assert len(expected) == 28
    shown = {name: [row["Argument"].split("`")[1] for row in rows] for name, rows in sections.items()}
    assert list(shown.items()) == list(expected.items())


def test_every_line_has_its_columns_and_a_sign_for_each_variant(sections: dict[str, list[Row]]) -> None:
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
            match = MARK.fullmatch(row[f"{variant.upper()} Supported"])
            assert match is not None
            sign, run = match.group(1), match.group(2)
            assert (run is not None) == ("✓" in sign or "◎" in sign), row
            assert run is None or variant in ran, row


def test_planned_and_unsupported_have_reasons_with_different_codes(
    page: str, sections: dict[str, list[Row]], published: list[Row]
) -> None:
    """Every row below a declaration has a footnote of the right kind; what core implements nowhere is listed."""
    codes = dict(re.findall(r"^(\[\^\d+\]): `(\w+)`: ", page, re.MULTILINE))
    planned = {argument.flag for argument in ARGUMENTS.values() if argument.arg.planned}
    for row in (row for group in sections.values() for row in group):
        for variant in VARIANTS:
            text = row[f"{variant.upper()} Supported"]
            codes_shown = {codes.get(label, "") for label in FOOTNOTE.findall(row["Argument"] + text)}
            if text.startswith("…"):
                assert codes_shown == {"planned"} or planned & set(re.findall(r"--[\w-]+", row["Argument"])), row
            elif text[0] in "✕–":
                assert codes_shown - {"planned", ""}, row
