"""The README is short, and its table of platforms says no more than the evidence in the tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs_site import ROOT

from srv_cpu.manifest import MANIFEST as CPU
from srv_cuda.manifest import MANIFEST as CUDA
from srv_npu.manifest import MANIFEST as NPU
from srv_rocm.manifest import MANIFEST as ROCM
from srv_xpu.manifest import MANIFEST as XPU

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[(\w+)\]\(docs/support/\1\.md\)[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
VARIANTS = {manifest.name: manifest.variants for manifest in (CPU, CUDA, ROCM, NPU, XPU)}
Columns = tuple[list[str], ...]


def strongest(folder: Path) -> dict[tuple[str, str], str]:
    """The strongest level of a passed test, by platform and variant."""
    by_place: dict[tuple[str, str], str] = {}
    for file in folder.glob("*.jsonl"):
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if line["outcome"] == "passed":
                place = line["platform"], line["variant"]
                by_place[place] = max(by_place.get(place, ""), line["level"])
    return by_place


def by_evidence(levels: dict[tuple[str, str], str]) -> dict[str, Columns]:
    """For each platform the variants that were run, only simulated or compiled, and only declared."""
    columns = {}
    for platform, variants in VARIANTS.items():
        of = {variant: levels.get((platform, variant), "") for variant in variants}
        columns[platform] = (
            [variant for variant in variants if of[variant] >= "E4"],
            [variant for variant in variants if of[variant] == "E3"],
            [variant for variant in variants if of[variant] < "E3"],
        )
    return columns


def test_each_variant_is_in_the_column_of_its_evidence() -> None:
    table = {platform: tuple(re.findall(r"\w+", cell) for cell in cells) for platform, *cells in ROW.findall(README)}
    assert table == by_evidence(strongest(ROOT / "support_matrix" / "evidence"))


def test_it_is_a_first_screen() -> None:
    assert len(README.splitlines()) <= 80
    assert {"make serve", "make test"} <= {line.split("#")[0].strip() for line in README.splitlines()}
