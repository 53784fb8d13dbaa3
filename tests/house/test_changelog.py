"""Every fragment of the changelog has the form that `scriv collect` puts into CHANGELOG.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from every import every

ROOT = Path(__file__).resolve().parents[2]
AREAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scriv"]["categories"]
LINE = re.compile(r"(- |  )\S.*|")


def faults(text: str) -> list[str]:
    """What is wrong with a fragment: it is headings, each followed by bullets."""
    before, *sections = re.split(r"^### ", text, flags=re.MULTILINE)
    problems = ["it does not begin with a heading of ###"] if before.strip() or not sections else []
    for section in sections:
        area, _, body = section.partition("\n")
        problems += [f"{area!r} is not one of {AREAS}"] * (area not in AREAS)
        problems += [f"{area}: no bullet"] * (not re.search("^- ", body, re.MULTILINE))
        problems += [f"{area}: {line!r} belongs to no bullet" for line in body.splitlines() if not LINE.fullmatch(line)]
    return problems


def test_the_fragments_are_collected_by_area() -> None:
    fragments = {file.name: file for file in (ROOT / "changelog.d").iterdir() if file.name != "README.md"}
    assert [name for name in fragments if not name.endswith(".md")] == []
    texts = {name: faults(file.read_text(encoding="utf-8")) for name, file in sorted(fragments.items())}
    assert {name: problems for name, problems in texts.items() if problems} == {}, (
        "changelog.d/README.md says how to write one"
    )


def test_the_changelog_has_the_areas_in_their_order() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count("scriv-insert-here") == text.count("scriv-end-here") == 1
    assert re.findall(r"^### (.+)$", text.partition("scriv-end-here")[2], re.MULTILINE) == AREAS


@every(
    "text",
    [
        "- A bullet without an area.\n",
        "### Unknown\n\n- One.\n",
        "### API\n\nOne.\n",
        "### API\n\n### Models\n\n- One.\n",
        "",
    ],
)
def test_another_form_is_found(text: str) -> None:
    assert faults(text)


@every("text", ["### API\n\n- One,\n  in two lines.\n- Two.\n\n### Models\n\n- Three.\n"])
def test_this_form_is_accepted(text: str) -> None:
    assert faults(text) == []
