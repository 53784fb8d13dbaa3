"""Drafts from the text itself: what followed the last tokens when they last occurred.

    text     the cat sat on the mat and the cat | sat on the        drafts
                 ─── ───────────            ───   ──────────
                 match  └─ what followed it        copied

The longest match of the last tokens wins, up to a maximum length, and the latest one of equal length. If the copy
reaches the end of the text, it goes on from its own beginning, so that a text with a period goes on with that period.
The idea is prompt lookup decoding (Saxena 2023); here it runs on the device, so that it can see tokens that the host
has not.
"""

from __future__ import annotations

import torch

from srv.speculative.drafter import DrafterContext
from srv.speculative.ngram import LONGEST, SHORTEST


class NgramDrafter:
    """Matches the last `min_match` to `max_match` tokens. Without a match, it proposes the last token again."""

    def __init__(self, context: DrafterContext) -> None:
        self._min_match, self._max_match = context.values[SHORTEST], context.values[LONGEST]

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """See `Drafter`. Compares each position with the last `max_match` tokens: about four operators per token."""
        last = (lengths - 1).unsqueeze(1)  # [rows, 1], the position of the last token
        places = torch.arange(tokens.shape[1], device=tokens.device)
        matched = self._matched(tokens, last)
        usable = (places < last) & (matched >= self._min_match)
        rank = torch.where(usable, matched * tokens.shape[1] + places, -1)
        best, end = rank.max(1, keepdim=True)
        end = torch.where(best >= 0, end, last - 1)
        steps = torch.arange(count, device=tokens.device) % (last - end).clamp(min=1)
        return tokens.gather(1, (end + 1 + steps).clamp(min=0)).long()

    def _matched(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """int32 [rows, width]: how many tokens up to and including each position equal the last ones of the row."""
        width = tokens.shape[1]
        running = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
        matched = torch.zeros(tokens.shape, dtype=torch.int32, device=tokens.device)
        for back in range(min(self._max_match, width)):
            token = tokens.gather(1, (last - back).clamp(min=0))
            running[:, back:].logical_and_(tokens[:, : width - back] == token)
            running[:, :back] = False
            matched += running
        return matched
