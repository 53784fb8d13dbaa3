"""A figure of a card has its raw record in the tree: the section with the figure names a file that names the card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs_site import DOCS, ROOT
from every import every

from srv_cuda.manifest import MANIFEST as CUDA
from srv_npu.manifest import MANIFEST as NPU
from srv_rocm.manifest import MANIFEST as ROCM
from srv_xpu.manifest import MANIFEST as XPU

# Decisions calculate with data sheets. The support pages are generated from evidence, and have no figures of speed.
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name not in ("adr", "support")),
]
FACTS = [manifest.facts for manifest in (CUDA, ROCM, NPU, XPU)]
# "L4" alone is a level of the conformance kit.
CARDS = {name for facts in FACTS for name in (*facts.cards, *facts.profiles)} - {"l4"} | {"nvidia l4", "mi300"}
CARD = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(CARDS)))})(?![\w-])", re.IGNORECASE)

UNIT = r"(?:%|×|times|(?:tokens?|tok|steps|requests)/s|[kMGT]i?B/s|[GT]?FLOPS?|[GT]FLOPS?/s|ms|µs|us|s|seconds)"
FIGURE = re.compile(rf"\d\s*{UNIT}(?![\w/])")
CELL = re.compile(r"\|\s*[-+]?\d[\d,.]*\s*(?=\|)")
IN_HEAD = re.compile(rf"(?<![\w/]){UNIT}(?![\w/])|share|ratio")
CODE = re.compile(r"^(?:```.*?^```|(?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
RECORD = re.compile(r"[\w./-]+\.jsonl?\b")


def sections(text: str) -> Iterator[str]:
    """Each heading with the text below it, without code blocks."""
    return (section for section in re.split(r"^(?=#{1,6} )", CODE.sub("", text), flags=re.MULTILINE) if section.strip())


def has_figures(section: str) -> bool:
    """Whether it has a number with a unit of speed or a share, or a table of such numbers."""
    blocks = section.split("\n\n")
    return any(FIGURE.search(block) or (IN_HEAD.search(block) and CELL.search(block)) for block in blocks)


def without_record(section: str, folders: tuple[Path, ...]) -> set[str]:
    """The cards that the section names beside figures, and that no file which it names as a record has in its text."""
    cards = {card.lower() for card in CARD.findall(section)} if has_figures(section) else set()
    files = {folder / name for folder in folders for name in RECORD.findall(section)}
    records = [file.read_text(encoding="utf-8").lower() for file in files if file.is_file()]
    return {card for card in cards if not any(card in record for record in records)}


def test_figures_of_cards_have_their_records() -> None:
    faults = [
        f"{page.relative_to(ROOT)}: {section.splitlines()[0]}: {', '.join(sorted(cards))}"
        for page in PAGES
        for section in sections(page.read_text(encoding="utf-8"))
        if (cards := without_record(section, (page.parent, ROOT)))
    ]
    assert faults == [], "commit the raw record and name it in the section"


@every(
    "text",
    [
        "On an H100, decoding reaches 77 to 80 % of the floor.",
        "Measured on one NVIDIA H100 80GB HBM3.\n\n| load | tokens/s |\n| --- | --- |\n| decode | 6,369 |",
        "## MI300X\n\nA copy moved 2,985 GB/s.",
        "| device | tokens/s |\n| --- | --- |\n| `cuda:sm90` | 151 |",
        "    srv doctor\n\nIt takes 6.61 ms on an H100.\n\n    srv platforms\n",
        "On an H100 it takes 6.61 ms ([record](gone.json)).",
        "On an H100 it takes 6.61 ms ([record](of_another.json)).",
    ],
)
def test_a_figure_without_its_record_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "of_another.json").write_text('{"device": "AMD EPYC"}', encoding="utf-8")
    assert [card for section in sections(text) for card in without_record(section, (tmp_path,))]


@every(
    "text",
    [
        "On an H100 it takes 6.61 ms ([record](card.json)).",
        "An H100 is a profile of `cuda`.",
        "On two cores a step takes 6.61 ms.",
        "It takes a minute:\n\n    SRV_GPU_SIMULATOR=sm90 ci/gpu/run.sh\n\nThe aim is 85 % of the floor.",
    ],
)
def test_what_needs_no_record_is_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"device": "NVIDIA H100 80GB HBM3"}', encoding="utf-8")
    assert [card for section in sections(text) for card in without_record(section, (tmp_path,))] == []
