"""The page on architectures lists those whose sizes are known, by whose layers compute them."""

from __future__ import annotations

import re
from pathlib import Path

from srv.models.families.known import NOT_THROUGH_TRANSFORMERS, SIZES_ONLY
from srv.models.families.registry import BUILT_IN

PAGE = Path(__file__).parents[4] / "docs" / "architectures.md"


def test_the_page_lists_all_families() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Known sizes")[2].partition("Of a vision model")[0]
    listed = [re.findall(r"`(\w+)`[,.]", part) for part in re.split("With native|Through|Sizes only", section)[1:]]
    through = [name for name in SIZES_ONLY if name not in NOT_THROUGH_TRANSFORMERS]
    others = [name for name in SIZES_ONLY if name in NOT_THROUGH_TRANSFORMERS]
    assert listed == [sorted(BUILT_IN), sorted(through), sorted(others)]
