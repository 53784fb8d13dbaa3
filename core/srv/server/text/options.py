"""How texts are encoded, as the operator chose. Must not know the arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How texts are encoded. `together`: those of one request in one call of the tokenizer. `gather`: those of
    concurrent requests too, at most `gather_texts` that arrive within `gather_seconds`. `processes`: that encode longer
    texts; 1: only this process does."""

    together: bool = False
    gather: bool = False
    gather_texts: int = 32
    gather_seconds: float = 0.002
    processes: int = 1


DEFAULT_TEXT_OPTIONS = TextOptions()
