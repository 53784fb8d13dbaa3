"""Structured output in the whole engine: whatever a model of noise prefers, its output follows its grammar."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from bytes_model import write_model
from grammar_world import DENSE, World, launch, of

from srv.grammar.backend import GrammarBackend
from srv.grammar.budget import SLOW_FILL_SECONDS
from srv.grammar.source import GrammarSource, from_choice, from_json_schema
from srv.io.messages import Abort
from srv.testing.engine import CheckedEngine
from srv.types import FinishReason, Grammar, RequestSpec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz"]}, "c": {"type": "string", "maxLength": 4}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
CHOICES = ["red", "green", "blue"]
EBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9] [0-9]? | root'
PROMPTS = (b"a", b"some words", b"a prompt that is much longer than the others " * 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[CheckedEngine]:
    with launch(world) as made:
        yield made


def follows(kind: str, text: str) -> bool:
    """Checked without the grammar's library."""
    if kind == "json":
        value = json.loads(text)
        return (
            list(value) == ["a", "b", "c"]
            and type(value["a"]) is bool
            and value["b"] in ("x", "yz")
            and isinstance(value["c"], str)
            and len(value["c"]) <= 4
        )
    if kind == "choice":
        return text in CHOICES
    if kind == "regex":
        return re.fullmatch(r"[a-f]{3,9}-[0-9]{2}(é|ab)", text) is not None
    while (shorter := re.sub(r"\(\d\d?(,\d\d?)*\)", "0", text)) != text:
        text = shorter
    return text == "0"


def sources() -> dict[str, GrammarSource]:
    return {
        "json": from_json_schema(SCHEMA, param="test"),
        "choice": from_choice(CHOICES, param="test"),
        "regex": of("regex", r"^[a-f]{3,9}-[0-9]{2}(é|ab)$"),
        "ebnf": of("grammar", EBNF),
    }


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 16},
        {"disable_graphs": True, "speculative_algorithm": "NGRAM"},
        {"is_embedding": True},
    ],
    ids=str,
)
def test_finished_outputs_follow_their_grammars(world: World, flags: dict[str, object]) -> None:
    """Greedy and sampled (four seeds, as n = 4), mixed with requests without a grammar, which are not changed."""
    wanted, requests = [], []
    for kind, source in sources().items():
        grammar = world.grammar(source)
        for number, prompt in enumerate(PROMPTS):
            requests.append(world.request(f"{kind} {number}", grammar, prompt))
        requests += [world.request(f"{kind} seed {n}", grammar, temperature=1.0, seed=n) for n in range(4)]
        wanted += [kind] * (len(PROMPTS) + 4)
    free = [world.request(f"free {n}", None, prompt, max_tokens=20) for n, prompt in enumerate(PROMPTS)]
    with launch(world, **flags) as made:
        alone = [result.tokens for result in made.generate(free)]
        results = made.generate([*requests, *(msg_again(each) for each in free)])
    ended = 0
    for kind, result in zip(wanted, results, strict=False):
        assert result.error is None
        if result.finish is FinishReason.STOP:
            ended += 1
            assert follows(kind, world.decoded(result.tokens)), (kind, world.decoded(result.tokens))
    assert ended > 0.8 * len(wanted)  # the others were cut off by their length
    assert [result.tokens for result in results[len(wanted) :]] == alone


def msg_again(spec: RequestSpec) -> RequestSpec:
    return RequestSpec(id=f"{spec.id} again", tokens=spec.tokens, params=spec.params)


def test_a_retracted_output_goes_on_where_its_grammar_was(world: World) -> None:
    """A pool too small for all: outputs are equal to those in a pool that holds them."""
    grammar = world.grammar(of("regex", "([a-z]{3} ){20}end"))
    prompts = [bytes([65 + number]) * 40 for number in range(6)]
    requests = [world.request(f"{number}", grammar, prompt) for number, prompt in enumerate(prompts)]
    with launch(world) as roomy:
        expected = [result.tokens for result in roomy.generate(requests)]
    with launch(world, max_total_tokens=448, schedule_conservativeness=0.1) as tight:
        results = tight.generate(requests)
        assert tight.stats().retractions > 0
    assert [result.tokens for result in results] == expected
    assert all(re.fullmatch("([a-z]{3} ){20}end", world.decoded(tokens)) for tokens in expected)


def test_an_end_token_is_sampled_only_where_the_grammar_accepts(world: World, engine: CheckedEngine) -> None:
    """A bias for the end tokens ends the output at the first place where it may, and not before."""
    grammar = world.grammar(of("regex", "[a-c]{5,}"))
    bias = tuple((token, 100.0) for token in world.facts.end_tokens)
    (result,) = engine.generate([world.request("biased", grammar, logit_bias=bias)])
    assert len(world.decoded(result.tokens)) == 5
    assert result.stop_token in world.facts.end_tokens


def test_the_grammar_begins_after_a_text(world: World, engine: CheckedEngine) -> None:
    """The text is found across tokens; before it nothing is masked."""
    grammar = world.grammar(from_choice(CHOICES, param="test"), begins_after="z")
    bias = tuple((token, 100.0) for token in b"z")
    (result,) = engine.generate([world.request("after", grammar, logit_bias=bias, max_tokens=12)])
    assert world.decoded(result.tokens)[0] == "z"
    assert world.decoded(result.tokens)[1:] in CHOICES


def test_an_aborted_request_leaves_nothing(world: World, engine: CheckedEngine) -> None:
    """While its grammar is compiled, and while it runs; the next request in its slot has no mask."""
    schema = from_json_schema({"enum": [f"value {number}" for number in range(20_000)]}, param="test")
    held = world.request("held", world.grammar(schema))
    engine.send(held)
    engine.send(Abort(["held"]))
    engine.run(["held"])
    assert engine.results["held"].finish is FinishReason.ABORT
    engine.send(world.request("running", world.grammar(of("regex", "[a-z]{150}"))))
    while len(engine.results["running"].tokens) < 3:
        engine.step()
    engine.send(Abort(["running"]))
    engine.run(["running"])
    assert engine.results["running"].finish is FinishReason.ABORT
    free = [world.request(name, None, max_tokens=10) for name in ("first", "second")]
    first, second = engine.generate(free)
    assert first.tokens == second.tokens
    assert not re.fullmatch("[a-z]*", world.decoded(first.tokens))
    grammars = engine.loop._grammars
    assert grammars is not None
    assert (grammars.held, grammars._states) == (0, {})


def test_a_grammar_that_compiles_blocks_nobody(world: World, engine: CheckedEngine) -> None:
    """Other requests finish while a grammar waits for its compilation."""
    grammars = engine.loop._grammars
    assert grammars is not None
    release = threading.Event()
    for _ in range(2):  # both threads are busy
        grammars._threads.submit(release.wait, 60)
    engine.send(world.request("waits", world.grammar(of("regex", "[a-k]{7}"))))
    engine.generate([world.request("passes", None, max_tokens=10)])
    assert engine.results["waits"].finish is None
    assert engine.stats().waiting == 1
    release.set()
    engine.run(["waits"])
    assert re.fullmatch("[a-k]{7}", world.decoded(engine.results["waits"].tokens))


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_request(world: World, engine: CheckedEngine) -> None:
    (result,) = engine.generate([world.request("broken", Grammar("{"))])
    assert result.finish is FinishReason.ERROR
    assert result.error is not None
    assert result.error[0] == "invalid_grammar"


def test_a_grammar_that_cannot_go_on_ends_its_request_with_an_error(world: World, engine: CheckedEngine) -> None:
    """It exceeds a limit of the library in the middle of the output; what runs beside it is not changed."""
    alone, _ = engine.generate([world.request(name, None, max_tokens=30) for name in ("alone", "too")])
    late = Grammar(world.backend.translate(of("regex", "[a-c]{9}(a|aa){2000}b"), DENSE))
    requests = [world.request("late", late), world.request("beside", None, max_tokens=30)]
    failed, beside = engine.generate(requests)
    assert failed.finish is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error[0] == "grammar_failed"
    assert re.search(r"after \d+ tokens of the output: lexer error: too many", failed.error[1])
    assert beside.tokens == alone.tokens
    (again,) = engine.generate([world.request("again", world.grammar(of("regex", "[a-k]{7}")))])
    assert re.fullmatch("[a-k]{7}", world.decoded(again.tokens))


@pytest.mark.parametrize("begins_after", ["", "z"])
def test_other_streams_go_on_while_the_first_mask_of_a_slow_grammar_is_made(world: World, begins_after: str) -> None:
    """Of one that was slow when it was checked: no step waits for any of its masks."""
    loop_thread, fills = threading.current_thread(), list[str]()

    class Watched:
        def __init__(self, backend: GrammarBackend) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def fill(self, matchers: Sequence[Any], masks: Any) -> None:
            fills.append(threading.current_thread().name)
            time.sleep(2 * SLOW_FILL_SECONDS)
            self._backend.fill(matchers, masks)

    grammar = world.grammar(of("regex", "[a-z]{9}"), begins_after=begins_after)
    bias = tuple((token, 100.0) for token in begins_after.encode())
    quick = world.request("quick", grammar, max_tokens=20, logit_bias=bias)
    slow = world.request("slow", msgspec.structs.replace(grammar, slow=True), max_tokens=20, logit_bias=bias)
    with launch(world) as engine:
        grammars = engine.loop._grammars
        assert grammars is not None
        (expected,) = engine.generate([quick])
        backend: Future[Any] = Future()
        backend.set_result(Watched(grammars._backend.result()))  # type: ignore[union-attr]
        grammars._backend = backend
        (result,) = engine.generate([slow])
        assert result.tokens == expected.tokens
    assert len(fills) >= 9
    assert loop_thread.name not in fills


def test_other_streams_go_on_while_a_slow_mask_is_made(world: World) -> None:
    """A backend whose masks block after the first one. No step of another request waits for them."""
    may_fill, blocked = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, backend: GrammarBackend) -> None:
            self._backend, self.masks = backend, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def fill(self, matchers: Sequence[Any], masks: Any) -> None:
            self.masks += 1
            if self.masks == 1:
                time.sleep(2 * SLOW_FILL_SECONDS)
            else:
                blocked.set()
                assert may_fill.wait(60)
            self._backend.fill(matchers, masks)

    slow = world.request("slow", world.grammar(of("regex", "[a-z]{9}")), max_tokens=20)
    free = world.request("free", None, b"others", max_tokens=30, ignore_eos=True)
    with launch(world) as engine:
        grammars = engine.loop._grammars
        assert grammars is not None
        expected = [result.tokens for result in engine.generate([slow, free])]
        backend: Future[Any] = Future()
        blocking = Slow(grammars._backend.result())  # type: ignore[union-attr]
        backend.set_result(blocking)
        grammars._backend = backend
        again = [msgspec.structs.replace(each, id=f"{each.id} again") for each in (slow, free)]
        for each in again:
            engine.send(each)
        engine.run(["free again"])
        assert blocked.wait(60)
        assert engine.results["slow again"].finish is None
        assert engine.stats().running == 1
        may_fill.set()
        engine.run(["slow again"])
        assert [engine.results[each.id].tokens for each in again] == expected
        for each in (slow, free):
            engine.send(msgspec.structs.replace(each, id=f"{each.id} aborted"))
        may_fill.clear()
        blocking.masks = 0
        engine.run(["free aborted"])
        engine.send(Abort(["slow aborted"]))
        engine.run(["slow aborted"])
        may_fill.set()
