"""Builds the drafter that the arguments ask for, and measures what drafts cost."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv.args.config import Config
from srv.speculative.ngram import NgramDrafter
from srv.worker.drafting import Drafting
from srv.worker.histories import Histories


def draft_count(config: Config) -> int:
    """Maximum drafts per row; 0 without a drafter."""
    if config.speculative.speculative_algorithm is None or config.speculative.speculative_num_draft_tokens is None:
        return 0
    return min(config.speculative.speculative_num_draft_tokens - 1, config.speculative.speculative_ngram_branch_length)


def drafting(config: Config, slots: int, width: int, device: torch.device) -> Drafting | None:
    """The drafter, with histories for `slots` requests of at most `width` tokens; None without a drafter."""
    if not draft_count(config):
        return None
    drafter = NgramDrafter(
        config.speculative.speculative_ngram_min_match_window_size,
        config.speculative.speculative_ngram_max_match_window_size,
    )
    with torch.inference_mode():
        return Drafting(drafter, Histories(slots, width, device), device)


def draft_cost(seconds: Callable[[int], float], drafts: int) -> float:
    """`Limits.draft_cost`, from the seconds that a step of one row with so many tokens takes."""
    if not drafts:
        return 0.0
    one, several = seconds(1), seconds(1 + drafts)
    per_token = max(several - one, 0.0) / drafts
    return per_token / max(one - per_token, per_token, 1e-9)
