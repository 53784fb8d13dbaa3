"""The model of `bytes_model` in a real engine, with grammars for its requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from srv.grammar.backend import GrammarBackend, GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource, Kind
from srv.planning.resolution import resolve_launch
from srv.server.text.tokenizer import ModelTextProcessor, load_text_processor
from srv.testing.engine import CheckedEngine, user_input
from srv.types import Grammar, RequestSpec, SamplingParams, Vocabulary

DENSE = JsonSpacing(none=True)


class World:
    """The model's text processor, and translated grammars."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        arguments = ["--device", "cpu", "--model-path", str(folder), "--load-format", "dummy"]
        self.facts = resolve_launch(user_input(arguments)).model
        self.text: ModelTextProcessor = load_text_processor(self.facts)
        vocabulary = self.text.vocabulary()
        assert vocabulary is not None
        self.vocabulary: Vocabulary = vocabulary
        context = GrammarContext(vocabulary, self.facts.vocab_size, self.facts.end_tokens)
        self.backend: GrammarBackend = make("llguidance", context)

    def grammar(self, source: GrammarSource, begins_after: str = "") -> Grammar:
        return Grammar(self.backend.translate(source, DENSE), begins_after)

    def request(self, name: str, grammar: Grammar | None, prompt: bytes = b"a", **params: Any) -> RequestSpec:
        options = {"max_tokens": 200, "temperature": 0.0, **params}
        return RequestSpec(id=name, tokens=tuple(prompt), params=SamplingParams(**options), grammar=grammar)

    def decoded(self, tokens: Sequence[int]) -> str:
        return self.text.decode(tokens)


def launch(world: World, **flags: object) -> CheckedEngine:
    options = {
        "device": "cpu",
        "model_path": world.folder,
        "load_format": "dummy",
        "dtype": "float32",
        "page_size": 16,
        "max_total_tokens": 2048,
        "max_running_requests": 16,
        **flags,
    }
    arguments: list[str] = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    engine = CheckedEngine.launch(arguments)
    engine.send(world.vocabulary)
    return engine


def of(kind: Kind, text: str) -> GrammarSource:
    return GrammarSource(kind=kind, text=text, param="test")
