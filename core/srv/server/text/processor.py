"""The seam between the HTTP protocols and everything that turns text into tokens and back.

Owns the two protocols `TextProcessor` and `Detokenizer` and the value `Piece`. Knows neither HTTP nor the
engine, and nothing of how a tokenizer works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """What may be said after some tokens were pushed.

    `text`: new text that no later token can take back. Incomplete UTF-8 and whatever could still become a
    stop string are held back.
    `stopped`: the stop string that has been found, or None; nothing may be pushed after it.
    `tokens_used`: how many tokens, counted from the start of the output, the released text is made of. A
    token counts from the moment a part of its text is released; one without text of its own (a special
    token) counts with its predecessor. When a stop string is found it is the number of tokens that the cut
    output keeps, and after `final` without a match it is all of them.
    """

    text: str
    stopped: str | None
    tokens_used: int


class Detokenizer(Protocol):
    """Turns the tokens of one output into text, step by step."""

    def push(self, tokens: Sequence[int], final: bool) -> Piece:
        """Take the next tokens (maybe none); `final` releases what is held back, for no more will come."""
        ...


class TextProcessor(Protocol):
    """A model's tokenizer and chat template. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool = True, **extra: object
    ) -> str:
        """The prompt text of a conversation. Raises RequestError if the template refuses the messages."""
        ...

    def detokenizer(
        self, prompt_ids: Sequence[int], stop: Sequence[str], skip_special_tokens: bool, include_stop: bool
    ) -> Detokenizer: ...

    def token_text(self, token: int) -> str:
        """One token as text; bytes that are no UTF-8 by themselves show as U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        ...
