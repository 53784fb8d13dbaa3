"""The facts of drafts from n-grams: what followed the last tokens of a text when they last occurred. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srv.speculative.algorithm import VERIFIED_TOKENS, DraftAlgorithm

SHORTEST = "speculative_ngram_min_match_window_size"
LONGEST = "speculative_ngram_max_match_window_size"
_COPIED = "speculative_ngram_branch_length"


def _max_drafts(values: Mapping[str, int]) -> int:
    return values[_COPIED]


ALGORITHM = DraftAlgorithm(
    name="NGRAM",
    drafter="srv.speculative.ngram_drafter:NgramDrafter",
    reads=(SHORTEST, LONGEST, _COPIED),
    defaults=MappingProxyType({VERIFIED_TOKENS: 4}),
    max_drafts=_max_drafts,
)
