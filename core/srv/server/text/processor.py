"""The interface between the HTTP protocols and the code that turns text into tokens and back.

Owns the protocols `TextProcessor` and `Detokenizer` and the value `TextDelta`. Must not know HTTP, the engine or how a
tokenizer works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from srv.server.text.stop_regex import StopRegex
from srv.types import Vocabulary


class TextDelta(NamedTuple):
    """The text that can be sent after some tokens were pushed.

    `text`: new text that no later token can change. Incomplete UTF-8 and text that could still become part of a stop
    string, or of the match of a regular expression that is to be cut off, are held back.
    `stop_string`: the stop string or regular expression that was found, or None; tokens pushed after it are ignored.
    `tokens_used`: the number of tokens, from the start of the output, that the released text contains. A token counts
    as soon as a part of its text is released; one without text (a special token) counts with its predecessor. If a stop
    string was found, this is the number of tokens of the truncated output; after `final` without a match it is all of
    them.
    """

    text: str
    stop_string: str | None
    tokens_used: int


class SpecialTokenAffixes(NamedTuple):
    """Ids that are added before and after a text that is encoded with special tokens."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class EncodedPair(NamedTuple):
    """The tokens of two texts, as the tokenizer joins them. `types_from`: the first token of type 1, or None."""

    tokens: list[int]
    types_from: int | None


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
    def has_tokenizer(self) -> bool:
        """Whether it knows text at all; without a tokenizer, requests and responses contain token ids only."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def templates(self) -> Sequence[str]:
        """The sources of the chat templates."""
        ...

    @property
    def affixes(self) -> SpecialTokenAffixes:
        """What `encode` adds around one text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts in one call, possibly in other threads and processes. Not for an event loop."""
        ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], keep: int | None = None) -> list[EncodedPair]:
        """Encode pairs of texts, with separators. Not for an event loop.

        `keep`: the longer text of a pair loses its end until the pair has so many tokens. Raises RequestError if that
        leaves none of a text beside the special tokens.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation; `variables` are more variables of the template.

        Raises RequestError if the template rejects the messages.
        """
        ...

    def apply_template_of_request(
        self,
        source: str,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """As `apply_chat_template`, by a template that came with the request. Raises RequestError for a faulty one."""
        ...

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool,
        include_stop: bool,
        keep: tuple[str, ...] = (),
        regex: StopRegex | None = None,
    ) -> Detokenizer:
        """`keep`: markers whose special tokens have text although the others are skipped.

        `regex`: ends the output where it matches. `include_stop`: the stop string, or the match, stays in the text.
        """
        ...

    def token_text(self, token: int) -> str:
        """One token as text; bytes that are not valid UTF-8 by themselves appear as U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The bytes of all tokens; None if the text of a token depends on its neighbours."""
        ...

    def close(self) -> None:
        """Free what it holds outside this process. A rendering that runs ends with an error."""
        ...
