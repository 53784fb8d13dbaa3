"""A drafter whose drafts are right: whether those of n-grams are depends on what a random model repeats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec
from srv.worker.runner import Runner


class Oracle:
    """A drafter that knows what follows, and is wrong at every `wrong`-th position."""

    def __init__(self, texts: list[list[int]], wrong: int) -> None:
        self.texts, self.wrong = texts, wrong

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        drafts = torch.zeros((len(lengths), count), dtype=torch.int64)
        for row, (row_tokens, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            texts = (text for text in self.texts if text[:length] == row_tokens[:length])
            text = next(texts, [])  # a row that is in flight when its request ends goes on
            for at, token in enumerate([*text[length : length + count], *[0] * count][:count]):
                drafts[row, at] = token if (length + at) % self.wrong else (token + 1) % 90
        return drafts


def oracle(
    drafting: CheckedEngine, requests: Sequence[RequestSpec], expected: Sequence[Sequence[int]], wrong: int
) -> None:
    """Replace the drafter of an engine with one that knows which tokens are expected after each request.

    Most drafts are accepted, and their number differs from row to row.
    """
    texts = [[*request.tokens, *tokens] for request, tokens in zip(requests, expected, strict=True)]
    runner = drafting.executor.worker.runner
    assert isinstance(runner, Runner)
    assert runner._drafting is not None
    runner._drafting._drafter = Oracle(texts, wrong)
