"""`bad_words` and `allowed_token_ids`: the token ids of words, and parameters that leave no token.

Must not know how they are masked (`srv.sample.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from srv.errors import RequestError
from srv.server.request.sampling_fields import Sampling


def forms(words: Sequence[str]) -> list[str]:
    """The texts as which words can occur in an output: at its start, and after a space."""
    return [form for word in words for form in (word, f" {word.lstrip()}")]


def sequences(encoded: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The different token sequences of these texts. One with a token that the model does not have never occurs."""
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids and max(ids) < vocab_size))


def check_tokens_left(sampling: Sampling, banned: Sequence[Sequence[int]], field: Callable[[str], str]) -> None:
    """Raises RequestError if no token of `allowed_token_ids` can be sampled. `field`: as in `PromptRequest`."""
    if not sampling.allowed_token_ids:
        return
    remaining = set(sampling.allowed_token_ids).difference(ids[0] for ids in banned if len(ids) == 1)
    other = "bad_words"
    if remaining and sampling.min_tokens:
        remaining.difference_update(sampling.stop_token_ids)
        other = "stop_token_ids"
    if not remaining:
        raise RequestError(
            f"{field('allowed_token_ids')} is refused: {field(other)} excludes all of these tokens; allow others",
            code="invalid_value",
            param=field("allowed_token_ids"),
        )
