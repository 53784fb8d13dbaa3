"""Builds the drafter that the arguments ask for, and measures what drafts cost."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv.args.config import Config
from srv.planning.steps import draft_count
from srv.platform.transfers import Transfers
from srv.speculative.ngram import NgramDrafter
from srv.worker.drafting import Drafting
from srv.worker.histories import Histories

_ROWS = (1, 4, 16)


def drafting(config: Config, slots: int, width: int, transfers: Transfers) -> Drafting | None:
    """The drafter, with histories for `slots` requests of at most `width` tokens; None without a drafter."""
    if not draft_count(config):
        return None
    drafter = NgramDrafter(
        config.speculative.speculative_ngram_min_match_window_size,
        config.speculative.speculative_ngram_max_match_window_size,
    )
    with torch.inference_mode():
        return Drafting(drafter, Histories(slots, width, transfers), transfers)


def step_seconds(seconds: Callable[[int, int], float], drafts: int, rows: int) -> tuple[tuple[int, float], ...]:
    """`Limits.step_seconds`: with and without drafts, of 1, 4 and 16 rows as far as there are so many.

    `seconds(rows, tokens)` measures a step of so many rows of so many tokens each.
    """
    if not drafts:
        return ()
    some = [count for count in _ROWS if count <= rows]
    measured = {count * (1 + drafts): seconds(count, 1 + drafts) for count in some}
    measured |= {count: seconds(count, 1) for count in some}
    return tuple(sorted(measured.items()))
