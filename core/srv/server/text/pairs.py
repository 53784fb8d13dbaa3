"""Joins two tokenized texts as the tokenizer does, with its separators and types of tokens."""

from __future__ import annotations

from tokenizers import Encoding, Tokenizer

from srv.server.text.processor import EncodedPair, SpecialTokenAffixes
from srv.server.text.truncation import room_for_text


def join_pair(
    tokenizer: Tokenizer, affixes: SpecialTokenAffixes | None, first: Encoding, second: Encoding, keep: int | None
) -> EncodedPair:
    """One prompt of two texts, which are encoded without special tokens.

    affixes: the special tokens around a prompt, if they replace the tokenizer's post-processor. keep: the most tokens.
    Raises RequestError if no text would be left.
    """
    prefix, suffix = ((), ()) if affixes is None else (affixes.prefix, affixes.suffix)
    added = len(prefix) + len(suffix) if affixes else tokenizer.num_special_tokens_to_add(True)
    if keep is not None and len(first.ids) + len(second.ids) + added > keep:
        sizes = _shortened(len(first.ids), len(second.ids), room_for_text(keep, added))
        for encoding, size in zip((first, second), sizes, strict=True):
            encoding.truncate(size)
    if affixes is not None:
        return EncodedPair([*prefix, *first.ids, *second.ids, *suffix], None)
    joined = tokenizer.post_process(first, second, True)
    types = joined.type_ids
    return EncodedPair(list(joined.ids), types.index(1) if 1 in types else None)


def _shortened(first: int, second: int, limit: int) -> tuple[int, int]:
    """The lengths of two texts: the longer one loses tokens first, then both do, as in the library `tokenizers`."""
    over, first_is_longer = first + second - limit, first > second
    if over <= 0:
        return first, second
    if second > first:
        lost = min(over, second - first)
        second, over = second - lost, over - lost
    else:
        lost = min(over, first - second)
        first, over = first - lost, over - lost
    less, more = over // 2, over - over // 2
    return (first - less, second - more) if first_is_longer else (first - more, second - less)
