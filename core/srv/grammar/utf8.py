"""Which tokens continue a text in UTF-8: neither overlong forms, nor surrogates, nor code points beyond U+10FFFF.

A tokenizer with a token per byte can write bytes that are no text, and a library that reads classes of characters as
ranges of bytes may allow them. Source: table 3-7 of the Unicode Standard, version 15.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from srv.grammar.backend import Masks

START = 0  # between two characters
NO_TEXT = 8
_TAIL = (0x80, 0xBF)
# By state: the first and the last byte, and the state behind it. States 1 to 3 lack so many bytes of the range _TAIL.
_TRANSITIONS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    (
        *((0x00, 0x7F, START), (0xC2, 0xDF, 1), (0xE0, 0xE0, 4), (0xE1, 0xEC, 2), (0xED, 0xED, 5), (0xEE, 0xEF, 2)),
        *((0xF0, 0xF0, 6), (0xF1, 0xF3, 3), (0xF4, 0xF4, 7)),
    ),
    ((*_TAIL, START),),
    ((*_TAIL, 1),),
    ((*_TAIL, 2),),
    ((0xA0, 0xBF, 1),),
    ((0x80, 0x9F, 1),),
    ((0x90, 0xBF, 2),),
    ((0x80, 0x8F, 2),),
)


def _next_states() -> tuple[bytes, ...]:
    table = [bytearray([NO_TEXT]) * 256 for _ in range(NO_TEXT + 1)]
    for row, transitions in zip(table, _TRANSITIONS, strict=False):
        for low, high, state in transitions:
            row[low : high + 1] = bytes([state]) * (high + 1 - low)
    return tuple(map(bytes, table))


_NEXT = _next_states()


def _after(state: int, data: bytes) -> int:
    for byte in data:
        state = _NEXT[state][byte]
    return state


class Utf8Tokens:
    """The tokens of one vocabulary. `masks`: int32 [states, words], the tokens that may follow in each state.

    tokens: the bytes of each token id; one without bytes may stand anywhere.
    """

    def __init__(self, tokens: Sequence[bytes], words: int) -> None:
        self._tokens = tokens
        self._cut: dict[int, int] = {}  # the state behind tokens at START that are no whole characters
        allowed = np.zeros((NO_TEXT, words * 32), dtype=np.uint8)
        allowed[START, : len(tokens)] = 1
        for token, data in enumerate(tokens):
            if not data.isascii() and (state := _after_start(data)) != START:
                self._cut[token] = state
                allowed[START, token] = state != NO_TEXT
            if not data or _TAIL[0] <= data[0] <= _TAIL[1]:
                allowed[START + 1 :, token] = [_after(state, data) != NO_TEXT for state in range(START + 1, NO_TEXT)]
        self.masks: Masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)

    def after(self, state: int, token: int) -> int:
        """The state behind this token; NO_TEXT if it may not stand there."""
        return self._cut.get(token, START) if state == START else _after(state, self._tokens[token])


def _after_start(data: bytes) -> int:
    try:
        data.decode()
    except UnicodeDecodeError:
        return _after(START, data)
    return START
