"""Drafts from n-grams: the longest match, then the latest; periods go on; other rows are not disturbed."""

from __future__ import annotations

import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.speculative.algorithm import DraftSizes
from srv.speculative.drafter import DrafterContext
from srv.speculative.ngram import LONGEST, SHORTEST
from srv.speculative.ngram_drafter import NgramDrafter


def propose(*texts: list[int], count: int = 4, shortest: int = 1, longest: int = 12) -> list[list[int]]:
    """Drafts for these texts together; beyond each text there is a token that occurs in none."""
    width = max(map(len, texts)) + 3
    tokens = torch.tensor([[*text, *[77] * (width - len(text))] for text in texts], dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts])
    values, sizes = {SHORTEST: shortest, LONGEST: longest}, DraftSizes(len(texts), width, 100)
    drafter = NgramDrafter(DrafterContext(values, count, sizes, HOST_TRANSFERS))
    return drafter.propose(tokens, lengths, count).tolist()


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 9, 2, 4, 9, 1, 2], [3, 9, 2, 4]),
        ([2, 3, 9, 2, 4, 9, 5, 2], [4, 9, 5, 2]),
        ([5, 6, 7, 5, 6, 7, 5], [6, 7, 5, 6]),
        ([8, 3, 3], [3, 3, 3, 3]),
        ([1, 2, 3], [3, 3, 3, 3]),
        ([4], [4, 4, 4, 4]),
    ],
    ids=["a match", "the longest match", "the latest match", "a period", "one token again", "no match", "one token"],
)
def test_drafts_are_what_followed_the_match(text: list[int], drafts: list[int]) -> None:
    assert propose(text) == [drafts]


def test_rows_of_different_lengths_do_not_disturb_one_another() -> None:
    texts = [[1, 2, 3, 4, 5, 9, 1, 2], [4], [7, 7], [3, 1, 3]]
    assert propose(*texts) == [propose(text)[0] for text in texts]


def test_matches_are_within_the_window() -> None:
    text = [1, 2, 3, 9, 2, 4, 9, 1, 2]
    assert propose(text, longest=1) == [[4, 9, 1, 2]]
    assert propose(text, shortest=2) == [[3, 9, 2, 4]]
    assert propose(text, shortest=3) == [[2, 2, 2, 2]]
