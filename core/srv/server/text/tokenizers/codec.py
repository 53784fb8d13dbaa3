"""Decodes token ids to text: all at once, or token by token.

Owns the bytes of each token and how the bytes of several tokens become characters. Must not know stop strings,
requests or the source of a vocabulary.

`ByteCodec` serves byte-level and SentencePiece vocabularies (nearly every model): each token has its bytes, the text is
their concatenation decoded as UTF-8, and the cost per token does not grow with the output. `WindowCodec` serves any
other tokenizer: it decodes the last few tokens with and without the new one, and returns the difference.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from srv.types import Vocabulary

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "\u2581"  # SentencePiece's symbol for a space
REPLACEMENT = "\ufffd"
PROMPT_TAIL = 16  # prompt tokens searched for an incomplete character
WINDOW_CONTEXT = 6  # prompt tokens that give WindowStream its first context
WINDOW_MAX_PENDING = 8  # tokens after which WindowStream no longer waits for an incomplete character


class TokenStream(Protocol):
    """Decodes one output token by token."""

    def feed(self, token: int) -> tuple[str, int | None]:
        """Add a token. Returns the newly complete characters, and the index in them at which the token's text starts.

        The index is 0 for a token that continues an incomplete character, 1 if that character turned out to be invalid
        (it becomes U+FFFD before the token's text), and None for a token without text.
        """
        ...

    def finish(self) -> str:
        """The text of an incomplete character, at the end of the output."""
        ...


class Codec(Protocol):
    """Decodes tokens. An id outside the vocabulary has no bytes and no text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def stream(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, keep: frozenset[int] = frozenset()
    ) -> TokenStream:
        """`keep`: special tokens that have text although the others are skipped."""
        ...

    def token_bytes(self, token: int) -> bytes: ...

    @property
    def special(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` skips."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The bytes of all tokens; None if the text of a token depends on its neighbours."""
        ...


def _byte_of_character() -> dict[str, int]:
    """GPT-2's mapping between printable characters and bytes (Radford et al. 2019): visible Latin-1 characters map to
    themselves, the other 68 bytes, in order, to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with characters outside the mapping is encoded as UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0xE2>` is that byte, and U+2581 is a space."""
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(METASPACE, " ").encode()


class ByteCodec:
    """Decodes tokens that have bytes. `to_bytes(id)` returns them, and is called once per token id.

    `strip_space`: the tokenizer adds a space before the first word of a text, and decoding removes it.
    `special`: the ids that `skip_special_tokens` skips.
    """

    def __init__(
        self, to_bytes: Callable[[int], bytes], vocab_size: int, special: frozenset[int], strip_space: bool
    ) -> None:
        self._to_bytes, self._special, self._strip_space = to_bytes, special, strip_space
        self._table: list[bytes | None] = [None] * vocab_size

    @property
    def special(self) -> frozenset[int]:
        return self._special

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._table):
            return b""
        cached = self._table[token]
        if cached is None:
            cached = self._table[token] = self._to_bytes(token)
        return cached

    def vocabulary(self) -> Vocabulary:
        tokens = [self.token_bytes(token) for token in range(len(self._table))]
        return Vocabulary(b"".join(tokens), list(map(len, tokens)), sorted(self._special))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        hidden = self._special if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in hidden])
        if self._strip_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, keep: frozenset[int] = frozenset()
    ) -> ByteStream:
        hidden = self._special - keep if skip_special_tokens else frozenset()
        starts_text = self._strip_space and not any(
            self.token_bytes(token) for token in prompt_ids if token not in hidden
        )
        tail = [self.token_bytes(token) for token in prompt_ids[-PROMPT_TAIL:] if token not in hidden]
        return ByteStream(self.token_bytes, hidden, starts_text, _incomplete_utf8(b"".join(tail)[-3:]))


def _incomplete_utf8(data: bytes) -> bytes:
    """The incomplete UTF-8 character at the end of `data`."""
    return data[utf_8_decode(data, "replace", False)[1] :]


class ByteStream:
    """Incremental UTF-8 decoding of token bytes. `from_prompt`: an incomplete character at the end of the prompt.

    These bytes are released only as part of a character that the output completes; otherwise they belong to the prompt
    alone.
    """

    __slots__ = ("_bytes_of", "_from_prompt", "_hidden", "_pending", "_starts_text")

    def __init__(
        self, bytes_of: Callable[[int], bytes], hidden: frozenset[int], starts_text: bool, from_prompt: bytes
    ) -> None:
        self._bytes_of, self._hidden, self._starts_text = bytes_of, hidden, starts_text
        self._pending, self._from_prompt = from_prompt, bool(from_prompt)

    def feed(self, token: int) -> tuple[str, int | None]:
        data = b"" if token in self._hidden else self._bytes_of(token)
        if not data:
            return "", None
        if self._starts_text:
            self._starts_text = False
            if data[:1] == b" ":
                data = data[1:]
        start = 0
        if self._pending:
            data, start = self._join(data)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text, start

    def _join(self, data: bytes) -> tuple[bytes, int]:
        is_continuation = data[0] & 0xC0 == 0x80
        from_prompt, self._from_prompt = self._from_prompt, False
        if is_continuation:
            return self._pending + data, 0
        return (data, 0) if from_prompt else (self._pending + data, 1)

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return "" if self._from_prompt else pending.decode("utf-8", "replace")


class WindowCodec:
    """Decodes tokens of a tokenizer that can only decode sequences, with `decode_ids(ids, skip_special_tokens)`."""

    def __init__(self, decode_ids: Callable[[list[int], bool], str], vocab_size: int, special: frozenset[int]) -> None:
        self._decode_ids, self._vocab_size, self._special = decode_ids, vocab_size, special

    @property
    def special(self) -> frozenset[int]:
        return self._special

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], skip_special_tokens=False).encode("utf-8", "replace")

    def vocabulary(self) -> None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._decode_ids([token for token in ids if 0 <= token < self._vocab_size], skip_special_tokens)

    def stream(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, keep: frozenset[int] = frozenset()
    ) -> WindowStream:
        hidden = self._special - keep if skip_special_tokens else frozenset()
        context = [token for token in prompt_ids[-WINDOW_CONTEXT:] if token not in hidden]
        return WindowStream(lambda ids: self.decode(ids, False), hidden, context)  # the hidden ones are never decoded


class WindowStream:
    """Decodes a bounded window, the last released tokens and the pending ones, and releases what is new in its text."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int], context: list[int]) -> None:
        self._decode, self._hidden = decode, hidden
        self._window, self._released_tokens, self._released_text = context, len(context), decode(context)

    def feed(self, token: int) -> tuple[str, int | None]:
        if token in self._hidden:
            return "", None
        self._window.append(token)
        text = self._decode(self._window)
        pending = len(self._window) - self._released_tokens
        if len(text) <= len(self._released_text) or (text.endswith(REPLACEMENT) and pending < WINDOW_MAX_PENDING):
            if pending >= WINDOW_MAX_PENDING:
                self._slide()
            return "", 0
        new = text[len(self._released_text) :]
        self._slide()
        return new, 0

    def _slide(self) -> None:
        self._window = self._window[self._released_tokens :]
        self._released_tokens, self._released_text = len(self._window), self._decode(self._window)

    def finish(self) -> str:
        return self._decode(self._window)[len(self._released_text) :]
