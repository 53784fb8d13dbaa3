"""The interface between the HTTP protocols and the code that turns text into tokens and back.

Owns the protocols `TextProcessor` and `Detokenizer` and the value `TextDelta`. Must not know HTTP, the engine or how a
tokenizer works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TextDelta(NamedTuple):
    """The text that can be sent after some tokens were pushed.

    `text`: new text that no later token can change. Incomplete UTF-8 and text that could still become part of a stop
    string are held back.
    `stop_string`: the stop string that was found, or None; tokens pushed after it are ignored.
    `tokens_used`: the number of tokens, from the start of the output, that the released text contains. A token counts
    as soon as a part of its text is released; one without text (a special token) counts with its predecessor. If a stop
    string was found, this is the number of tokens of the truncated output; after `final` without a match it is all of
    them.
    """

    text: str
    stop_string: str | None
    tokens_used: int


class Detokenizer(Protocol):
    """Turns the tokens of one output into text incrementally."""

    def push(self, tokens: Sequence[int], final: bool) -> TextDelta:
        """Add the next tokens, possibly none; `final`: no more follow, so release the text that is held back."""
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
        """The prompt text of a conversation. Raises RequestError if the template rejects the messages."""
        ...

    def detokenizer(
        self, prompt_ids: Sequence[int], stop: Sequence[str], skip_special_tokens: bool, include_stop: bool
    ) -> Detokenizer: ...

    def token_text(self, token: int) -> str:
        """One token as text; bytes that are not valid UTF-8 by themselves appear as U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        ...
