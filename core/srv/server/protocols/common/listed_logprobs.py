"""The limits on log-probabilities of token ids that a request lists, in all protocols.

Must not know how log-probabilities are computed or formatted.
"""

from __future__ import annotations

from collections.abc import Sequence

from srv.errors import RequestError
from srv.server.request.prompt_request import TokenizedPrompt

MAX_LISTED_LOGPROBS = 1 << 20  # of a request: ids times positions


def check_listed(prompts: Sequence[TokenizedPrompt], param: str, length: str) -> None:
    """Raises RequestError for too many. `param`: the request's field with the ids; `length`: that of the output."""
    entries = 0
    for prompt in prompts:
        params = prompt.params
        scored = 0 if params.prompt_logprobs is None else len(prompt.tokens) - params.prompt_logprobs_start
        entries += len(params.logprob_token_ids) * (scored + params.max_tokens * len(prompt.seeds))
    if entries > MAX_LISTED_LOGPROBS:
        raise RequestError(
            f"{param} is refused: ids times positions are up to {entries} log-probabilities, the limit is"
            f" {MAX_LISTED_LOGPROBS}; send fewer ids, or lower {length}",
            code="invalid_value",
            param=param,
        )


def check_needs_logprobs(ids: Sequence[int], requested: bool, field: str) -> None:
    """Raises RequestError for ids without the field that requests log-probabilities."""
    if ids and not requested:
        raise RequestError(
            f"logprob_token_ids is refused: it needs {field}; send both or neither",
            code="invalid_value",
            param="logprob_token_ids",
        )
