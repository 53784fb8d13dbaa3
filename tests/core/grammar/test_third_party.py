"""Grammar backends of other distributions: found by entry point, checked, and used when they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from args_world import resolved, user
from every import every
from platform_plugins import write_plugin

from srv.errors import PluginError, Refusal
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import best, further_names, make
from srv.grammar.source import GrammarSource
from srv.types import Vocabulary

CONTEXT = GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (256,))
FACTS = """
from srv.grammar.facts import GrammarFacts

BACKEND = GrammarFacts("loud", {priority}, "{distribution}", "plugin_acme.backend:make_backend")
"""
# The output is one capital letter after another.
BACKEND = """
import numpy as np

from srv.errors import GrammarError


class Matcher:
    failure = ""
    accepting = True

    def accept(self, tokens):
        return all(65 <= token <= 90 for token in tokens)


class Loud:
    words = 9

    def translate(self, source, spacing):
        if source.kind != "regex":
            raise GrammarError("it is not loud")
        return source.text

    def compile(self, text):
        return Matcher

    def fill(self, matchers, masks):
        bits = np.zeros(288, dtype=np.uint8)
        bits[65:91] = bits[256] = 1
        masks[:] = np.packbits(bits, bitorder="little").view(np.int32)


def make_backend(context):
    return {made}
"""


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    expression: str = "Loud()",
    distribution: str = "numpy",
    name: str = "loud",
) -> None:
    folder.mkdir(exist_ok=True)
    sys.modules.pop("plugin_acme.backend", None)
    facts = FACTS.format(priority=99, distribution=distribution)
    write_plugin(folder, "acme", facts, group="srv.grammars", entry=name, attribute="BACKEND")
    (folder / "plugin_acme" / "backend.py").write_text(BACKEND.replace("{made}", expression))
    monkeypatch.syspath_prepend(str(folder))


def test_a_backend_is_used_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    assert further_names() == ("loud",)
    assert best() == "llguidance"
    config = resolved(user(grammar_backend="loud")).config
    assert config.platform.grammar_backend == "loud"
    backend = make("loud", CONTEXT)
    matcher = backend.compile(backend.translate(GrammarSource(kind="regex", text="A+", param="x"), JsonSpacing()))()
    assert matcher.accept([65])
    assert not matcher.accept([97])


def test_one_whose_distribution_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, distribution="absent-library")
    with pytest.raises(Refusal, match="the distribution absent-library is not installed"):
        resolved(user(grammar_backend="loud"))


@every(
    ("expression", "part"),
    [("object()", "returned object, which has no words"), ("context.nothing", "raised AttributeError")],
)
def test_a_faulty_one_is_named(expression: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / expression[:3], monkeypatch, expression)
    with pytest.raises(PluginError, match=part):
        make("loud", CONTEXT)


def test_none_may_take_the_name_of_one_of_srv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, name="xgrammar")
    with pytest.raises(PluginError, match="both claim this name"):
        make("xgrammar", CONTEXT)
