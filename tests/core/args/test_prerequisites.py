"""Arguments that have an effect only with another one: a user's value is refused without it, a default is not."""

from __future__ import annotations

import pytest
from args_world import manifest, model, resolved, user

from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.errors import Refusal
from srv.platform.facts import Default
from srv.specs import FullAttention

DEPENDENT = [argument for argument in ARGUMENTS.values() if argument.arg.only_with]


def test_a_value_without_effect_is_refused_with_what_is_missing() -> None:
    with pytest.raises(Refusal) as refusal:
        resolved(user(pooling="mean", speculative_num_draft_tokens=4))
    actual = {rejection.what: rejection for rejection in refusal.value.rejections}
    assert {rejection.code for rejection in actual.values()} == {"other_missing"}
    assert (actual["pooling"].reason, actual["pooling"].remedy) == (
        "it has no effect while is_embedding is false",
        "Set is_embedding too, or leave it out.",
    )
    assert actual["speculative_num_draft_tokens"].reason == "it has no effect while speculative_algorithm is unset"


def test_it_is_accepted_with_the_other_argument_or_as_the_default() -> None:
    assert resolved(user(pooling="mean", is_embedding=True)).config.model.pooling == "mean"
    assert resolved(user(pooling="last")).config.model.pooling == "last"


def test_what_would_leave_nothing_to_serve_is_refused() -> None:
    encoder = model(cache_groups=(FullAttention((), 4, 64, 64),), pooling="mean", generates=False)
    for values, argument in (
        ({"is_embedding": False}, "is_embedding"),
        ({"score_template": "qwen3_reranker", "skip_tokenizer_init": True}, "skip_tokenizer_init"),
    ):
        with pytest.raises(Refusal) as refusal:
            resolved(user(**values), model=encoder if argument == "is_embedding" else model())
        assert [(rejection.what, rejection.code) for rejection in refusal.value.rejections] == [(argument, "excluded")]


def test_a_default_of_a_platform_is_accepted_without_effect() -> None:
    platform = manifest(defaults=(Default("pooling", lambda context: "mean", "its models are trained for it"),))
    assert resolved(on=platform).config.model.pooling == "mean"


def test_values_that_are_tried_alone_come_with_what_they_need() -> None:
    assert with_prerequisite("pooling", "mean") == {"is_embedding": True, "pooling": "mean"}
    assert with_prerequisite("dist_timeout", 9) == {"tp_size": 2, "dist_timeout": 9}
    assert with_prerequisite("speculative_ngram_branch_length", 3)["speculative_algorithm"] == "NGRAM"
    for alone in ({"pooling": "last"}, {"page_size": 16}):
        assert with_prerequisite(*next(iter(alone.items()))) == alone


def test_prerequisites_are_arguments_that_depend_on_no_other() -> None:
    assert [argument.name for argument in DEPENDENT if not set(argument.arg.only_with) <= ARGUMENTS.keys()] == []
    assert [name for argument in DEPENDENT for name in argument.arg.only_with if ARGUMENTS[name].arg.only_with] == []
