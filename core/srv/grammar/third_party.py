"""Grammar backends of other distributions: entry points of the group `srv.grammars`. Torch-free.

Must not know the backends of `srv` itself. `srv.platform.extensions` checks what is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from srv.grammar.backend import GrammarBackend, GrammarContext
from srv.grammar.facts import GROUP, GrammarFacts
from srv.platform.extensions import Extensions

BACKENDS = Extensions(
    GROUP,
    GrammarFacts,
    "grammar backend",
    "docs/grammars.md",
    types={"name": str, "priority": int, "distribution": str, "target": str, "extra": str},
    targets=("target",),
)
_MEMBERS = ("words", "translate", "compile", "fill")


def make(facts: GrammarFacts, context: GrammarContext) -> GrammarBackend:
    """Import and make a backend. Whatever goes wrong is a PluginError that names the distribution."""
    module, _, function = facts.target.partition(":")
    member = f"{facts.name}.target"
    try:
        product: Any = getattr(importlib.import_module(module), function)(context)
    except Exception as error:
        reason = f"{facts.target} raised {type(error).__name__}: {error}"
        raise BACKENDS.error_in(BACKENDS.provider(facts.name), member, reason, "import_failed") from error
    missing = [name for name in _MEMBERS if not hasattr(product, name)]
    if missing:
        reason = f"{facts.target} returned {type(product).__name__}, which has no {missing[0]}"
        raise BACKENDS.error_in(BACKENDS.provider(facts.name), member, reason)
    backend: GrammarBackend = product
    return backend
