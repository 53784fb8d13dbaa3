"""What core must know of a grammar backend before its library is imported, as data. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

GROUP = "srv.grammars"  # the entry points of other distributions


class GrammarFacts(NamedTuple):
    """A backend by name. The one of `srv` with the highest `priority` that is installed is the default.

    `distribution`: what has to be installed, and `extra` the extra of `srv` that installs it ("": none does).
    `target`: "module:function", which makes the backend from a `srv.grammar.backend.GrammarContext`; it imports the
    library.
    """

    name: str
    priority: int
    distribution: str
    target: str
    extra: str = ""
