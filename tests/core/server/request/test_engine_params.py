"""What the engine gets for a client's temperature and top-k, at their limits."""

from __future__ import annotations

import math

from every import every

from srv.server.request.engine_params import GREEDY_BELOW, engine_params
from srv.server.request.sampling_fields import Sampling
from srv.types import SamplingParams

VOCAB = 100


def params(**fields: float) -> SamplingParams:
    return engine_params(Sampling(**fields), 5, ((1, 2),), VOCAB)


@every(("temperature", "expected"), [(0.0, 0.0), (math.nextafter(GREEDY_BELOW, 0), 0.0),
                                     (GREEDY_BELOW, GREEDY_BELOW), (0.7, 0.7)])  # fmt: skip
def test_temperatures_below_the_limit_are_greedy_and_no_others(temperature: float, expected: float) -> None:
    assert params(temperature=temperature).temperature == expected


@every(("top_k", "expected"), [(VOCAB - 1, VOCAB - 1), (VOCAB, -1), (VOCAB + 1, -1), (-1, -1)])
def test_top_k_of_the_whole_vocabulary_keeps_all_tokens(top_k: int, expected: int) -> None:
    assert params(top_k=top_k).top_k == expected


def test_the_length_and_the_tokens_of_bad_words_are_passed_on() -> None:
    assert (params().max_tokens, params().banned) == (5, ((1, 2),))
