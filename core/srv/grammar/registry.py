"""The grammar backends by name. Torch-free; a backend's library is imported when it is first needed.

    srv.grammars               <backend> = package.module:BACKEND                     (a third party's backend)

`srv.grammar.third_party` checks those of other distributions (docs/adr/0069-grammar-backends.md).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from srv.grammar.facts import GROUP, GrammarFacts
from srv.platform.installed import entries

if TYPE_CHECKING:  # the arguments import this module: it must not import numpy
    from srv.grammar.backend import GrammarBackend, GrammarContext

GRAMMAR_OFF = "none"  # no structured output: requests that ask for it are refused

BUILT_IN: Mapping[str, GrammarFacts] = MappingProxyType(
    {
        facts.name: facts
        for facts in (
            GrammarFacts("llguidance", 10, "llguidance", "srv.grammar.llguidance_backend:make_backend"),
            GrammarFacts("xgrammar", 5, "xgrammar", "srv.grammar.xgrammar_backend:make_backend", "xgrammar"),
            GrammarFacts("outlines", 1, "outlines-core", "srv.grammar.outlines_backend:make_backend", "outlines"),
        )
    }
)


def further_names() -> tuple[str, ...]:
    """The names of the backends of other distributions; none is loaded."""
    return tuple(dict.fromkeys(entry.name for entry in entries(GROUP)))


def find(name: str) -> GrammarFacts | None:
    """The facts of a backend; None if there is none of this name.

    Raises PluginError if a third party's backend of that name is faulty, or if two distributions claim the name.
    """
    if name in further_names():
        from srv.grammar import third_party  # most installations do not need it

        return third_party.BACKENDS.find(name, taken=name in BUILT_IN or name == GRAMMAR_OFF)
    return BUILT_IN.get(name)


def installed(facts: GrammarFacts) -> bool:
    """Whether the distribution of a backend can be imported."""
    return _importable(facts.distribution.replace("-", "_"))


@functools.cache  # it reads folders, and every resolution asks
def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def best() -> str:
    """The name of the installed backend of `srv` with the highest priority; `GRAMMAR_OFF` if none is installed.

    Those of other distributions are used when they are asked for.
    """
    backends = sorted(filter(installed, BUILT_IN.values()), key=lambda facts: -facts.priority)
    return backends[0].name if backends else GRAMMAR_OFF


def make(name: str, context: GrammarContext) -> GrammarBackend:
    """Import a backend's library and make the backend, which takes a tenth of a second for a large vocabulary."""
    facts = find(name)
    if facts is None:
        raise KeyError(f"there is no grammar backend {name!r}")
    if name not in BUILT_IN:
        from srv.grammar import third_party

        return third_party.make(facts, context)
    module, _, function = facts.target.partition(":")
    factory: Callable[[GrammarContext], GrammarBackend] = getattr(importlib.import_module(module), function)
    return factory(context)
