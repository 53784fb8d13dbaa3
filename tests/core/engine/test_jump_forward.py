"""Jump-forward in the whole engine: tokens that a grammar forces take no steps, and outputs are as if they did."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from bytes_model import write_model
from engine_small import SmallModels, engine, greedy, message
from grammar_world import World, launch, of
from torch import Tensor

import srv.engine.grammars
from srv.grammar.source import from_json_schema
from srv.io.messages import Finish
from srv.sched.late import LateInputMaker, LateInputs, LateRow
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import FinishReason, RequestSpec

RECORD = r"(record=[a-z]{2}; the total amount=[0-9]{2}; status=(accepted|rejected by)\.){3}end of the records"
SCHEMA = {
    "type": "object",
    "properties": {
        "document_kind": {"const": "an invoice of the second kind"},
        "is_paid": {"type": "boolean"},
        "customer_number": {"type": "integer", "minimum": 10, "maximum": 99},
        "currency_of_all_amounts": {"const": "EUR"},
    },
    "required": ["document_kind", "is_paid", "customer_number", "currency_of_all_amounts"],
    "additionalProperties": False,
}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def jumping(world: World) -> Iterator[CheckedEngine]:
    with launch(world) as made:
        yield made


def every_kind(world: World) -> list[RequestSpec]:
    """Requests of all kinds that sampling distinguishes, two of which have no grammar."""
    record, schema = world.grammar(of("regex", RECORD)), world.grammar(from_json_schema(SCHEMA, param="test"))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.9, "top_p": 0.8, "seed": 6, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"logit_bias": ((ord("a"), 2.0), (ord("7"), 3.0))},
        {"hidden_states": True},
        {"prompt_logprobs": 1, "temperature": 0.7, "seed": 7},
        {"logprobs": 2, "temperature": 0.7, "seed": 8},
        {"stop_token_ids": (ord("m"),)},
        {"max_tokens": 37},
    ]
    requests = [world.request(f"record {n}", record, bytes([65 + n]) * 9, **kind) for n, kind in enumerate(kinds)]
    requests += [world.request(f"schema {n}", schema, bytes([80 + n]), **kind) for n, kind in enumerate(kinds)]
    return [*requests, *(world.request(f"free {n}", None, b"free text", max_tokens=60, seed=n) for n in range(2))]


def without_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srv.engine.grammars, "may_jump", lambda request: False)


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, GenerationResult]:
    """The results of all kinds without jumps."""
    requests = every_kind(world)
    with pytest.MonkeyPatch.context() as patch:
        without_jumps(patch)
        with launch(world, max_total_tokens=8192) as made:
            results = made.generate(requests)
    return dict(zip([request.id for request in requests], results, strict=True))


def assert_same(result: GenerationResult, other: GenerationResult) -> None:
    assert (result.tokens, result.finish, result.stop_token) == (other.tokens, other.finish, other.stop_token)
    assert (result.error, len(result.vectors)) == (None, len(other.vectors))
    pairs = zip(result.logprobs + result.prompt_logprobs, other.logprobs + other.prompt_logprobs, strict=True)
    for one, two in pairs:
        assert (one.token, one.rank, one.logprob) == (two.token, two.rank, pytest.approx(two.logprob, abs=1e-4))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_overlap_schedule": True},
        {"disable_graphs": True},
        {"chunked_prefill_size": 16},
        {"attention_backend": "torch_native", "disable_radix_cache": True},
        DRAFTS,
        {**DRAFTS, "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_outputs_are_those_without_jumps(
    world: World, expected: dict[str, GenerationResult], flags: dict[str, object]
) -> None:
    requests = every_kind(world)
    with launch(world, max_total_tokens=8192, **flags) as made:
        results = dict(zip(expected, made.generate(requests), strict=True))
        for name, result in results.items():
            assert_same(result, expected[name])
        for name in ("record 0", "schema 1"):
            steps, tokens = counted(made, next(each for each in requests if each.id == name))
            assert steps < tokens / 2
    assert len(re.findall("the total", world.decoded(results["record 0"].tokens))) == 3


def counted(made: CheckedEngine, request: RequestSpec) -> tuple[int, int]:
    """The steps that a request takes alone, and its tokens."""
    before = made.stats().steps
    (result,) = made.generate([request])
    return made.stats().steps - before, len(result.tokens)


def test_log_probabilities_are_those_of_sampled_tokens(world: World, jumping: CheckedEngine) -> None:
    """A forced token has the log-probability that the model gives it, for which it has to be sampled."""
    grammar = world.grammar(of("regex", "nothing but this text"))
    (result,) = jumping.generate([world.request("scored", grammar, logprobs=0)])
    assert len(result.logprobs) == len(result.tokens) == 1 + len("nothing but this text")
    assert all(one.logprob < -1.0 for one in result.logprobs[:-1])  # of a model of noise
    steps, tokens = counted(jumping, world.request("scored again", grammar, logprobs=0))
    assert steps >= tokens


def test_a_constant_takes_few_steps(world: World, jumping: CheckedEngine) -> None:
    text = "no token has more than one of these letters " * 3
    steps, tokens = counted(jumping, world.request("constant", world.grammar(of("regex", text))))
    assert tokens == len(text) + 1
    assert steps <= 8


@pytest.mark.parametrize("overlap", [True, False])
def test_a_length_ends_the_output_within_what_is_forced(world: World, overlap: bool) -> None:
    """After each number of tokens, wherever the jump begins."""
    grammar = world.grammar(of("regex", "[ab] forced text [ab] forced"))
    flags = {} if overlap else {"disable_overlap_schedule": True}
    with launch(world, **flags) as made:
        (whole,) = made.generate([world.request("whole", grammar)])
        cut = [world.request(f"{count}", grammar, max_tokens=count) for count in range(1, len(whole.tokens))]
        for count, result in enumerate(made.generate(cut), start=1):
            assert (result.tokens, result.finish) == (whole.tokens[:count], FinishReason.LENGTH)


def test_a_stop_token_ends_the_output_within_what_is_forced(world: World, jumping: CheckedEngine) -> None:
    grammar = world.grammar(of("regex", "[ab] forced text, and more of it"))
    (result,) = jumping.generate([world.request("stopped", grammar, stop_token_ids=(ord(","),))])
    assert world.decoded(result.tokens)[1:] == " forced text,"
    assert (result.finish, result.stop_token) == (FinishReason.STOP, ord(","))


def test_a_stop_string_within_what_is_forced_leaves_no_pages(world: World, jumping: CheckedEngine) -> None:
    """The API process finds it, and ends the request while its next jump is in flight. The engine checks its pages."""
    grammar = world.grammar(of("regex", "([ab] forced text )+"))
    jumping.send(world.request("stopped", grammar))
    while "forced" not in world.decoded(jumping.results["stopped"].tokens):
        jumping.step()
    jumping.send(Finish("stopped"))
    while jumping.stats().running:
        jumping.step()
    again = jumping.generate([world.request(f"again {n}", grammar, max_tokens=40) for n in range(2)])
    assert again[0].tokens == again[1].tokens
    assert jumping.results["stopped"].tokens == again[0].tokens[: len(jumping.results["stopped"].tokens)]


def test_retracted_requests_go_on_where_they_were(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = world.grammar(of("regex", "([a-z]{3} is forced; ){9}end"))
    requests = [world.request(f"{n}", grammar, bytes([65 + n]) * 40) for n in range(6)]
    flags = {"max_total_tokens": 448, "schedule_conservativeness": 0.1, "page_size": 4}
    with launch(world, **flags) as tight:
        results = tight.generate(requests)
        assert tight.stats().retractions > 0
    without_jumps(monkeypatch)
    with launch(world) as roomy:
        for result, other in zip(results, roomy.generate(requests), strict=True):
            assert_same(result, other)


def only_after(token: int) -> int | None:
    """The only token that may follow; None if there are several."""
    if 40 <= token < 47:
        return token + 1
    return 40 if token % 6 == 0 else None


def allowed_after(token: int) -> list[int]:
    only = only_after(token)
    return [3 * each for each in range(1, 13)] if only is None else [only]


class Chain(CheckedEngine):
    """Its late inputs are masks for `allowed_after` and what they force."""

    def late_inputs(self) -> LateInputMaker:
        return self

    def concerns(self, request: RequestSpec) -> bool:
        return True

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        masks, forced = [], []
        for row in rows:
            last = (row.output or row.request.tokens)[-1]
            masks.append((row.slot, sum(1 << each for each in allowed_after(last)).to_bytes(13, "little")))
            known: list[int] = []
            while (only := only_after(known[-1] if known else last)) is not None:
                known.append(only)
            if len(known) > 1:
                forced.append((row.slot, tuple(known)))
        return LateInputs(tuple(masks), tuple(forced))


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("mistral", {}), ("gemma3", {}), ("qwen3_next", {}), ("qwen3_next", {"mamba_track_interval": 8})],
    ids=str,
)
def test_windows_and_recurrent_states_see_jumped_tokens(
    small_models: SmallModels, kind: str, flags: dict[str, object]
) -> None:
    """Also those that go on from a cached prefix that contains such tokens."""
    small = small_models(kind)

    def change(prompt: list[int], logits: Tensor, output: list[int]) -> Tensor:
        masked = torch.full_like(logits, -1e9)
        allowed = allowed_after((output or prompt)[-1])
        masked[allowed] = logits[allowed]
        return masked

    prompts = small.prompts[2:6]
    expected = [greedy(small.model, prompt, 40, partial(change, prompt)) for prompt in prompts]
    with engine(small, kind=Chain, **flags) as made:
        before = made.stats().steps
        results = made.generate([message(f"{n}", prompt, 40) for n, prompt in enumerate(prompts)])
        assert made.stats().steps - before < 36
        assert [result.tokens for result in results] == expected
        turns = [[*prompt, *tokens[:30]] for prompt, tokens in zip(prompts, expected, strict=True)]
        again = made.generate([message(f"again {n}", turn, 10) for n, turn in enumerate(turns)])
        assert [result.tokens for result in again] == [tokens[30:] for tokens in expected]
