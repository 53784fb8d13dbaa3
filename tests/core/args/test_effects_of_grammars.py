"""Arguments of structured output have an effect: from the command line to the tokens of a model of noise."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from bytes_model import write_model

from srv.errors import Refusal, RequestError
from srv.grammar.registry import BUILT_IN
from srv.grammar.source import GrammarSource, from_json_schema
from srv.planning.resolution import resolve_launch
from srv.server.request.grammars import Grammars
from srv.server.start import grammar_settings
from srv.server.text.tokenizer import load_text_processor
from srv.testing.engine import CheckedEngine, user_input
from srv.types import RequestSpec, SamplingParams
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

SCHEMA = from_json_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}, param="test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bytes"))


def arguments(folder: Path, *flags: str) -> list[str]:
    return ["--device", "cpu", "--model-path", str(folder), "--load-format", "dummy", "--dtype", "float32", *flags]


def output(folder: Path, wish: str, *flags: str, source: GrammarSource = SCHEMA) -> str:
    """The output of a server with these flags for a request that prefers the byte `wish` wherever it is allowed."""
    with CheckedEngine.launch(arguments(folder, "--max-total-tokens", "256", *flags)) as engine:
        text = load_text_processor(engine.context.model)
        grammars = Grammars(grammar_settings(engine.context), text, engine.send)
        try:
            checked = asyncio.run(grammars.check(source))
        finally:
            grammars.close()
        params = SamplingParams(max_tokens=250, temperature=0.0, logit_bias=((ord(wish), 100.0),))
        (result,) = engine.generate([RequestSpec(id="one", tokens=(97,), params=params, grammar=checked.grammar)])
        return text.decode(result.tokens)


def refusals(folder: Path, *flags: str) -> list[tuple[str, str]]:
    with pytest.raises(Refusal) as caught:
        resolve_launch(user_input(arguments(folder, *flags)))
    return [(rejection.what, rejection.code) for rejection in caught.value.rejections]


@covers(
    "grammar_backend=llguidance",
    "grammar_backend=xgrammar",
    "grammar_backend=outlines",
    "grammar_backend=none",
    platform="cpu",
)
def test_the_grammar_backend_constrains_outputs_and_none_refuses_them(folder: Path) -> None:
    for flags in ((), *(("--grammar-backend", name) for name in BUILT_IN)):
        value = json.loads(output(folder, "1", *flags))
        assert value == [1, 1]
    with pytest.raises(RequestError) as caught:
        output(folder, "1", "--grammar-backend", "none")
    assert (caught.value.code, caught.value.param) == ("no_grammars", "test")
    assert "--grammar-backend none" in caught.value.message
    with CheckedEngine.launch(arguments(folder, "--grammar-backend", "none")) as engine:
        assert engine.loop._late is None  # no step has a second phase


def test_backends_differ_in_what_they_take(folder: Path) -> None:
    """outlines knows regular languages only, and XGrammar no pattern for white space."""
    grammar = GrammarSource(kind="grammar", text='root ::= "a" root | "b"', param="test")
    assert output(folder, "b", "--grammar-backend", "xgrammar", source=grammar) == "b"
    with pytest.raises(RequestError, match="regular languages only"):
        output(folder, "b", "--grammar-backend", "outlines", source=grammar)
    pattern = ("--constrained-json-whitespace-pattern", " ")
    assert refusals(folder, *pattern, "--grammar-backend", "xgrammar") == [
        ("constrained_json_whitespace_pattern", "backend_ignores")
    ]


@covers("constrained_json_whitespace_pattern", platform="cpu")
def test_white_space_follows_the_pattern(folder: Path) -> None:
    assert "_" not in output(folder, "_")
    spaced = output(folder, "_", "--constrained-json-whitespace-pattern", "_{1,3}")
    assert "___" in spaced
    assert "____" not in spaced
    assert len(json.loads(spaced.replace("_", " "))) == 2


@covers("constrained_json_disable_any_whitespace=true", "constrained_json_disable_any_whitespace=false", platform="cpu")
def test_white_space_is_disabled(folder: Path) -> None:
    assert " " in output(folder, " ")
    assert " " not in output(folder, " ", "--constrained-json-disable-any-whitespace")


def test_arguments_of_json_that_have_no_effect_are_refused(folder: Path) -> None:
    pattern, disable = ("--constrained-json-whitespace-pattern", " "), ("--constrained-json-disable-any-whitespace",)
    off = ("--grammar-backend", "none")
    assert refusals(folder, *pattern, *disable) == [("constrained_json_whitespace_pattern", "excluded")]
    assert refusals(folder, *pattern, *off) == [("constrained_json_whitespace_pattern", "other_missing")]
    assert refusals(folder, *disable, *off) == [("constrained_json_disable_any_whitespace", "other_missing")]
    assert refusals(folder, "--constrained-json-whitespace-pattern", "(") == [
        ("constrained_json_whitespace_pattern", "bad_value")
    ]
