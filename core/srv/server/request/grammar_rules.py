"""What cannot be combined with a grammar, because some output could then not follow both; and what clients are told of
schemas that are enforced in part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from srv.errors import RequestError
from srv.grammar.source import GrammarSource
from srv.server.request.grammars import CheckedGrammar, Grammars
from srv.server.request.sampling_fields import Sampling

# By field: the only value that can be combined, and why others cannot.
_CONTRADICTIONS: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "ignore_eos": (False, "the output ends where the grammar does, and nothing may follow"),
        "min_tokens": (0, "the output ends where the grammar does, which may be earlier"),
        "allowed_token_ids": ((), "it may leave none of the tokens that the grammar allows"),
        "bad_words": ((), "it may leave none of the tokens that the grammar allows"),
    }
)
# The header of a response whose grammar does not enforce all of a schema: a JSON array of texts.
NOT_ENFORCED = "x-srv-not-enforced"
MAX_NOTES, MAX_NOTE = 32, 80  # texts, and characters of one


async def checked_grammar(
    grammars: Grammars, sampling: Sampling, field: Callable[[str], str], owner: str
) -> CheckedGrammar | None:
    """The grammar of a request, if it has one. Raises RequestError. field, owner: as in `PromptRequest`."""
    grammars.check_backend(sampling.grammar_backend)
    if sampling.grammar is None:
        return None
    _check_combination(sampling.grammar, sampling, field)
    return await grammars.check(sampling.grammar, owner)


def _check_combination(source: GrammarSource, sampling: Sampling, field: Callable[[str], str]) -> None:
    """Raises RequestError for parameters that contradict a grammar.

    Stop strings and stop token ids may cut an output short, which then counts as invalid; biases may not be infinite.
    """
    for name, (only, why) in _CONTRADICTIONS.items():
        if getattr(sampling, name) != only:
            _refuse(field(name), source, why)
    if sampling.max_tokens == 0:
        _refuse(f"{field('max_tokens')} = 0", source, "nothing is generated that could follow it")


def _refuse(what: str, source: GrammarSource, why: str) -> None:
    raise RequestError(
        f"{what} is refused with {source.param}: {why}; send one of them",
        code="invalid_value",
        param=what.partition(" ")[0],
    )


def not_enforced(grammars: Iterable[CheckedGrammar | None]) -> dict[str, str]:
    """The header that names what the grammars of a request leave out, if they leave out anything."""
    notes = list(dict.fromkeys(note for grammar in grammars if grammar is not None for note in grammar.left_out))
    shown = [note if len(note) <= MAX_NOTE else f"{note[:MAX_NOTE]}..." for note in notes[:MAX_NOTES]]
    # JSON in ASCII escapes all that may not stand in a header but this one character.
    return {NOT_ENFORCED: json.dumps(shown).replace("\x7f", "\\u007f")} if shown else {}
