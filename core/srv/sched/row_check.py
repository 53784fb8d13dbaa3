"""Checks that an executor's results are those that a plan asked for. Must not know how they are used."""

from __future__ import annotations

from srv.errors import InternalError
from srv.sched.plan import Row, RowResult
from srv.sched.request import Request
from srv.types import PoolingParams


def check_row_result(request: Request, row: Row, result: RowResult) -> None:
    """Raises InternalError unless the row's result has the tokens, scores and vectors that the plan asked for."""
    min_tokens, max_tokens = (1, row.sample) if row.sample else (0, 0)
    end = row.computed + row.scheduled
    scores = min(end, len(request.prompt) - 1) - (end - row.score) if row.score else 0
    if not min_tokens <= len(result.tokens) <= max_tokens or len(result.scores or ()) != scores:
        raise InternalError(
            f"request {request.id}: the row of positions {row.computed}..{end - 1} returned {len(result.tokens)} tokens"
            f" and {len(result.scores or ())} scores; expected {min_tokens} to {max_tokens} tokens and {scores} scores"
        )
    pooled = isinstance(request.spec.params, PoolingParams)
    wanted = row.vectors > 0 and (not pooled or end == len(request.prompt))
    if (result.vectors is not None) != wanted:
        problem = "none of the hidden states; expected some" if wanted else "some of the hidden states; expected none"
        raise InternalError(f"request {request.id}: the row of positions {row.computed}..{end - 1} returned {problem}")
