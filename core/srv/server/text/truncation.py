"""Shortens tokenized texts to a number of tokens (`truncate_prompt_tokens`). Must not know requests or tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from srv.errors import RequestError
from srv.server.text.processor import SpecialTokenAffixes


def room_for_text(keep: int, added: int) -> int:
    """How many of `keep` tokens are left for text beside the `added` ones. Raises RequestError if none is."""
    if keep <= added:
        raise RequestError(
            f"truncate_prompt_tokens = {keep} is refused: it leaves no text, because each prompt has {added} other"
            f" tokens; send at least {added + 1}",
            code="invalid_value",
            param="truncate_prompt_tokens",
        )
    return keep - added


def around_text(prefix: Sequence[int], text: Sequence[int], suffix: Sequence[int], keep: int | None) -> list[int]:
    """A text between tokens that stay: it loses its end so that the whole has at most `keep` tokens, if given.

    Raises RequestError if nothing of a longer text would be left.
    """
    if keep is not None and len(prefix) + len(text) + len(suffix) > keep:
        text = text[: room_for_text(keep, len(prefix) + len(suffix))]
    return [*prefix, *text, *suffix]


def without_end(tokens: Sequence[int], keep: int, affixes: SpecialTokenAffixes) -> list[int]:
    """`keep` tokens of a longer text with these special tokens around it; the text loses its end, as in transformers.

    Raises RequestError if no text is left beside them.
    """
    text = tokens[len(affixes.prefix) : len(tokens) - len(affixes.suffix)]
    return around_text(affixes.prefix, text, affixes.suffix, keep)
