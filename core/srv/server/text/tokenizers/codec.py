"""From token ids back to text: whole, and one token after another.

Owns what a token stands for in bytes and how bytes of several tokens become characters. Must not know
stop strings, requests or where a vocabulary came from.

Two ways. `ByteCodec`, for byte-level and SentencePiece vocabularies (nearly every model): each token has its
bytes, text is their concatenation read as UTF-8, and a token costs the same however long the output is.
`WindowCodec`, for any other tokenizer: decode the last few tokens with and without the new one, and say the
difference.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_BORDER = "\u2581"  # SentencePiece's visible space
REPLACEMENT = "\ufffd"
PROMPT_TAIL = 16  # prompt tokens looked at for an unfinished character
WINDOW_CONTEXT = 6  # prompt tokens that give WindowStream its first context
WINDOW_PATIENCE = 8  # tokens that WindowStream waits for a character to be finished


class TokenStream(Protocol):
    """Text of one output, token by token."""

    def feed(self, token: int) -> tuple[str, int | None]:
        """Take a token: (characters that are now certain, index among them at which its own text begins).

        The index is 0 for a token that goes on with an unfinished character, 1 if that one was given up
        (it then shows as U+FFFD before the token's text), None for a token without text of its own.
        """
        ...

    def finish(self) -> str:
        """The text of what is still unfinished."""
        ...


class Codec(Protocol):
    """What tokens stand for. An id outside the vocabulary stands for nothing: no bytes, no text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TokenStream: ...

    def token_bytes(self, token: int) -> bytes: ...


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al. 2019): Latin-1's visible characters mean
    themselves, the other 68 bytes, in order, are U+0100 and onward."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside that alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0xE2>` is that byte, the border sign is a space."""
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(WORD_BORDER, " ").encode()


class ByteCodec:
    """Tokens that stand for bytes. `spell(id)` gives them and is asked once a token.

    `strip_space`: the vocabulary writes a space before the first word of a text, which decoding takes away.
    `special`: ids that `skip_special_tokens` hides.
    """

    def __init__(
        self, spell: Callable[[int], bytes], vocab_size: int, special: frozenset[int], strip_space: bool
    ) -> None:
        self._spell, self._special, self._strip_space = spell, special, strip_space
        self._table: list[bytes | None] = [None] * vocab_size

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._table):
            return b""
        known = self._table[token]
        if known is None:
            known = self._table[token] = self._spell(token)
        return known

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        hidden = self._special if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in hidden])
        if self._strip_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> ByteStream:
        hidden = self._special if skip_special_tokens else frozenset()
        begins_text = self._strip_space and not any(
            self.token_bytes(token) for token in prompt_ids if token not in hidden
        )
        tail = [self.token_bytes(token) for token in prompt_ids[-PROMPT_TAIL:] if token not in hidden]
        return ByteStream(self.token_bytes, hidden, begins_text, _unfinished(b"".join(tail)[-3:]))


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character and do not end it."""
    return data[utf_8_decode(data, "replace", False)[1] :]


class ByteStream:
    """Incremental UTF-8 over the bytes of tokens. `borrowed`: bytes of a character that the prompt began.

    A borrowed beginning is shown only as part of the character that the output completes; if the output
    begins otherwise it belongs to the prompt alone.
    """

    __slots__ = ("_begins_text", "_borrowed", "_bytes_of", "_hidden", "_pending")

    def __init__(
        self, bytes_of: Callable[[int], bytes], hidden: frozenset[int], begins_text: bool, borrowed: bytes
    ) -> None:
        self._bytes_of, self._hidden, self._begins_text = bytes_of, hidden, begins_text
        self._pending, self._borrowed = borrowed, bool(borrowed)

    def feed(self, token: int) -> tuple[str, int | None]:
        data = b"" if token in self._hidden else self._bytes_of(token)
        if not data:
            return "", None
        if self._begins_text:
            self._begins_text = False
            if data[:1] == b" ":
                data = data[1:]
        begin = 0
        if self._pending:
            data, begin = self._join(data)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text, begin

    def _join(self, data: bytes) -> tuple[bytes, int]:
        goes_on = data[0] & 0xC0 == 0x80
        borrowed, self._borrowed = self._borrowed, False
        if goes_on:
            return self._pending + data, 0
        return (data, 0) if borrowed else (self._pending + data, 1)

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return "" if self._borrowed else pending.decode("utf-8", "replace")


class WindowCodec:
    """Tokens of a tokenizer that can only decode sequences. `decode_ids(ids, skip_special_tokens)` does it."""

    def __init__(self, decode_ids: Callable[[list[int], bool], str], vocab_size: int, special: frozenset[int]) -> None:
        self._decode_ids, self._vocab_size, self._special = decode_ids, vocab_size, special

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], skip_special_tokens=False).encode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._decode_ids([token for token in ids if 0 <= token < self._vocab_size], skip_special_tokens)

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> WindowStream:
        hidden = self._special if skip_special_tokens else frozenset()
        context = list(prompt_ids[-WINDOW_CONTEXT:])
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), hidden, context)


class WindowStream:
    """Differences between decodings of a bounded window: the tokens last shown and those not yet shown."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int], context: list[int]) -> None:
        self._decode, self._hidden = decode, hidden
        self._window, self._shown_tokens, self._shown = context, len(context), decode(context)

    def feed(self, token: int) -> tuple[str, int | None]:
        if token in self._hidden:
            return "", None
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._shown_tokens
        if len(text) <= len(self._shown) or (text.endswith(REPLACEMENT) and waiting < WINDOW_PATIENCE):
            if waiting >= WINDOW_PATIENCE:
                self._slide()
            return "", 0
        new = text[len(self._shown) :]
        self._slide()
        return new, 0

    def _slide(self) -> None:
        self._window = self._window[self._shown_tokens :]
        self._shown_tokens, self._shown = len(self._window), self._decode(self._window)

    def finish(self) -> str:
        return self._decode(self._window)[len(self._shown) :]
