"""The parameters that the engine gets for a client's parameters. Must not know tokens or text."""

from __future__ import annotations

from srv.server.request.sampling_fields import Sampling
from srv.types import SamplingOptions, SamplingParams

GREEDY_BELOW = 1e-5  # smaller temperatures overflow float32 logits, so the limit, greedy sampling, is used


def engine_params(
    sampling: Sampling, max_tokens: int, banned: tuple[tuple[int, ...], ...], vocab_size: int
) -> SamplingParams:
    """`banned`: the token sequences of bad words."""
    options = {name: getattr(sampling, name) for name in SamplingOptions.__struct_fields__} | {"banned": banned}
    if sampling.temperature < GREEDY_BELOW:
        options["temperature"] = 0.0
    if sampling.top_k >= vocab_size:
        options["top_k"] = -1  # it keeps all tokens
    return SamplingParams(max_tokens=max_tokens, **options)
