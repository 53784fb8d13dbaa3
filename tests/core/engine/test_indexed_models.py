"""Served models with sparse attention: greedy tokens are those of transformers, however requests are scheduled."""

from __future__ import annotations

from typing import Any

import pytest
from engine_small import Small, engine, messages, saved_small
from every import every
from indexed_small import small
from oracle_drafter import oracle

from srv.errors import Refusal

LENGTHS = (1, 5, 17, 40, 33)
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """One of its three layers attends to the keys that the layer before has chosen."""
    return saved_small(small("glm"), tmp_path_factory.mktemp("glm"), LENGTHS)


@pytest.fixture(scope="module")
def hy(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Of several residual streams; its attention has sinks, and gates."""
    return saved_small(small("hy"), tmp_path_factory.mktemp("hy"), LENGTHS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Without experts."""
    return saved_small(small("v32-dense"), tmp_path_factory.mktemp("dense"), LENGTHS)


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """DeepSeek-V3.2, with experts in groups."""
    return saved_small(small("v32"), tmp_path_factory.mktemp("v32"), LENGTHS)


@pytest.fixture(scope="module")
def axk2(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """With gates of norms and of attention."""
    return saved_small(small("axk2"), tmp_path_factory.mktemp("axk2"), LENGTHS)


def served(running: Any, expected: Small) -> list[int]:
    """All requests at once, twice, compared; the cached tokens of the second time."""
    for _ in range(2):
        results = running.generate(messages(expected.prompts))
        assert [result.tokens for result in results] == expected.tokens
    return [result.cached_tokens for result in results]


@pytest.mark.parametrize("kind", ["v32", "glm", "axk2"])
def test_chunks_batches_and_prefix_hits_give_the_tokens_of_transformers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The backend that computes indexers is chosen, and keys of a cached prefix are chosen from."""
    model: Small = request.getfixturevalue(kind)
    with engine(model, page=4, chunk=9) as running:
        assert running.context.resolved.config.platform.attention_backend == "torch_native"
        assert max(served(running, model)) >= 36


def test_several_residual_streams_give_the_tokens_of_transformers(hy: Small) -> None:
    """In chunks, in a batch, after prefix hits, and with drafts."""
    with engine(hy, page=4, chunk=9) as running:
        assert max(served(running, hy)) >= 36
    with engine(hy, page=16, chunk=64, **DRAFTS) as running:
        oracle(running, messages(hy.prompts), hy.tokens, wrong=5)
        served(running, hy)
        assert running.stats().drafts_accepted > 0


@every("overlap", [True, False])
def test_drafts_and_steps_that_do_not_overlap_give_the_same(glm: Small, overlap: bool) -> None:
    with engine(glm, page=16, chunk=64, overlap=overlap, **DRAFTS) as running:
        oracle(running, messages(glm.prompts), glm.tokens, wrong=5)
        served(running, glm)
        assert running.stats().drafts_accepted > 0


def test_retractions_give_the_same(dense: Small) -> None:
    """A pool for fewer tokens than all requests need."""
    with engine(dense, page=16, chunk=16, pool=128, schedule_conservativeness=0.01) as running:
        served(running, dense)
        assert running.stats().retractions > 0


def test_a_backend_without_indexers_is_refused_by_name(dense: Small) -> None:
    reason = r"it does not support keys chosen by an indexer \(sparse attention\)"
    with pytest.raises(Refusal, match=reason), engine(dense, page=16, attention_backend="native"):
        pass
