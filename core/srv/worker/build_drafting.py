"""Builds the drafter that the arguments ask for, and measures what drafts cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from srv.args.config import Config
from srv.planning.steps import draft_algorithm, draft_count, draft_values
from srv.platform.transfers import Transfers
from srv.speculative.algorithm import DraftSizes
from srv.speculative.drafter import DrafterContext
from srv.speculative.load_drafter import make_drafter
from srv.worker.drafting import Drafting
from srv.worker.histories import Histories

_ROWS = (1, 4, 16)


def drafting(config: Config, sizes: DraftSizes, transfers: Transfers) -> Drafting | None:
    """The drafter, with a history for each of `sizes.rows` slots; None without a drafter.

    Raises PluginError if the drafter of a third party is faulty.
    """
    algorithm, most = draft_algorithm(config), draft_count(config)
    if algorithm is None or not most:
        return None
    context = DrafterContext(draft_values(config, algorithm), most, sizes, transfers)
    with torch.inference_mode():
        drafter = make_drafter(algorithm, context)
        return Drafting(drafter, Histories(sizes.rows, sizes.width, transfers), transfers)


def step_seconds(
    seconds: Callable[[int, int], float], drafts: int, rows: int, captured: Sequence[int] = ()
) -> tuple[tuple[int, float], ...]:
    """`Limits.step_seconds`: with and without drafts, of 1, 4 and 16 rows as far as there are so many.

    `seconds(rows, tokens)` measures a step of so many rows of so many tokens each. `captured`: without drafts, these
    of the row counts are measured, for jump-forward; they are captured, so that it takes no more than their steps.
    """
    if not drafts:
        return tuple([(count, seconds(count, 1)) for count in _ROWS if count in captured])
    some = [count for count in _ROWS if count <= rows]
    measured = {count * (1 + drafts): seconds(count, 1 + drafts) for count in some}
    measured |= {count: seconds(count, 1) for count in some}
    return tuple(sorted(measured.items()))
