"""The fields of `/generate` about log-probabilities: what they ask for, and how much they may ask for.

Must not know how log-probabilities are computed or formatted.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

import msgspec

from srv.errors import RequestError
from srv.server.protocols.common.listed_logprobs import check_listed
from srv.server.protocols.native.values import per_prompt
from srv.server.request.fields import shorten
from srv.server.request.prompt_request import TokenizedPrompt
from srv.server.request.sampling_fields import MAX_LISTED_IDS, Sampling

LISTED = "token_ids_logprob"


def listed_ids(value: object, count: int, batch: bool) -> list[tuple[int, ...]]:
    """The token ids of each prompt, from one array for all of them or an array per prompt. Raises RequestError."""
    if isinstance(value, list) and not any(isinstance(element, list | NoneType) for element in value):
        return [_ids(value, LISTED)] * count
    return per_prompt(value, count, batch, LISTED, _ids)


def _ids(value: object, param: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise RequestError(
            f"{param} = {shorten(value)} is refused: it must be an array of token ids (integers)",
            code="invalid_type",
            param=param,
        )
    if len(value) > MAX_LISTED_IDS:
        raise RequestError(
            f"{param} has {len(value)} token ids, the limit is {MAX_LISTED_IDS}; send fewer",
            code="invalid_value",
            param=param,
        )
    return tuple(value)


def with_logprobs(sampling: Sampling, requested: bool, start: int, top: int, token_ids: tuple[int, ...]) -> Sampling:
    """The parameters with what the fields about log-probabilities ask for. Raises RequestError."""
    if not requested:
        for value, param in ((start != -1, "logprob_start_len"), (top != 0, "top_logprobs_num"), (token_ids, LISTED)):
            if value:
                raise RequestError(
                    f"{param} is refused: it needs return_logprob = true; send both or neither",
                    code="invalid_value",
                    param=param,
                )
        return sampling
    return msgspec.structs.replace(
        sampling,
        logprobs=top,
        prompt_logprobs=None if start < 0 else top,
        prompt_logprobs_start=max(0, start),
        logprob_token_ids=token_ids,
    )


def check_positions(starts: Sequence[int], prompts: Sequence[TokenizedPrompt]) -> None:
    """Raises RequestError for a start behind its prompt, or for too many log-probabilities of given tokens."""
    for start, prompt in zip(starts, prompts, strict=True):
        _check_start(start, len(prompt.tokens))
    check_listed(prompts, LISTED, "max_new_tokens")


def _check_start(start: int, prompt_tokens: int) -> None:
    if start >= prompt_tokens:
        raise RequestError(
            f"logprob_start_len = {start} is refused: the prompt has {prompt_tokens} tokens; use a position in it",
            code="invalid_value",
            param="logprob_start_len",
        )
