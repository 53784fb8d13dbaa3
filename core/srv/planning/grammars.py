"""Whether outputs can follow grammars: by this answer the API accepts them, and the engine compiles them.

Must not know how a grammar is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

from srv.args.config import Config
from srv.grammar.registry import GRAMMAR_OFF
from srv.specs import ModelFacts


class GrammarChoice(NamedTuple):
    """`backend`: its name, or `GRAMMAR_OFF`, for the reason `why`."""

    backend: str
    why: str = ""


def grammar_choice(config: Config, model: ModelFacts) -> GrammarChoice:
    backend = config.platform.grammar_backend
    if backend in (None, GRAMMAR_OFF):
        return GrammarChoice(
            GRAMMAR_OFF, "the server was started with --grammar-backend none; start it with a grammar backend"
        )
    if not model.generates:
        return GrammarChoice(GRAMMAR_OFF, "the model generates no text")
    if not model.end_tokens:
        return GrammarChoice(
            GRAMMAR_OFF, "the model has no end token, so that no output could end where its grammar does"
        )
    return GrammarChoice(backend)
