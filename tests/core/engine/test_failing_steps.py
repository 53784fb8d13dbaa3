"""A real runner with a step that raises: only the requests of that step end with an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_small import Small, engine, make_small, message

from srv.types import FinishReason

NO_TOKEN = 10_000  # the model has 97


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder: Path = tmp_path_factory.mktemp("llama")
    return make_small("llama", folder)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.5}], ids=["forward", "start"])
def test_a_failed_step_does_not_affect_other_requests(small: Small, overlap: bool, params: dict[str, float]) -> None:
    """A token id out of range makes the model raise; with a penalty, the start of the request's slot raises.

    The first step has only the bad request and its neighbour, which fails too. The next request starts one step later;
    with overlap that step is in flight before the failure is known.
    """
    neighbour = small.prompts[3]
    with engine(small, 4, 5 + len(neighbour), overlap) as served:
        scheduler = served._engine.scheduler
        scheduler.limits = replace(scheduler.limits, vocab_size=None)
        bad, neighbouring, later, latest = served.generate(
            [
                message("bad", [NO_TOKEN, 3, 4, 5, 6], **params),
                message("neighbouring", neighbour),
                message("later", small.prompts[5]),
                message("latest", small.prompts[7]),
            ]
        )
        (again,) = served.generate([message("again", neighbour)])
    for failed in (bad, neighbouring):
        assert failed.finish is FinishReason.ERROR
        assert failed.error is not None
        assert failed.error[0] == "step_failed"
        assert failed.tokens == []
    assert (later.error, later.tokens) == (None, small.tokens[5])
    assert (latest.error, latest.tokens) == (None, small.tokens[7])
    assert (again.tokens, again.cached_tokens) == (small.tokens[3], 0)


def test_a_token_outside_the_vocabulary_is_refused_before_any_step(small: Small) -> None:
    neighbour = small.prompts[3]
    with engine(small, 4, 5 + len(neighbour)) as served:
        bad, biased, neighbouring = served.generate(
            [
                message("bad", [NO_TOKEN, 3, 4]),
                message("biased", [3, 4], logit_bias=((NO_TOKEN, 1.0),)),
                message("neighbouring", neighbour),
            ]
        )
    for refused, where in ((bad, "prompt"), (biased, "logit_bias")):
        wanted = f"{where} contains token id {NO_TOKEN}, but the vocabulary is 0 to 96; leave it out"
        assert (refused.finish, refused.error) == (FinishReason.ERROR, ("invalid_token_id", wanted))
    assert (neighbouring.error, neighbouring.tokens) == (None, small.tokens[3])
