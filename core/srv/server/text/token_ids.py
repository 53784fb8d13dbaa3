"""The text processor of a server without a tokenizer (`--skip-tokenizer-init`): token ids in, token ids out.

Must not know HTTP or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from srv.errors import RequestError
from srv.server.text.processor import EncodedPair, SpecialTokenAffixes, TextDelta
from srv.server.text.stop_regex import StopRegex
from srv.types import Vocabulary


def no_tokenizer(param: str | None) -> RequestError:
    """The refusal of a field, or of a whole request, that needs a tokenizer."""
    what = "this request" if param is None else param
    return RequestError(
        f"{what} is refused: the server has no tokenizer, because it was started with --skip-tokenizer-init; send token"
        " ids to /generate (input_ids) or /v1/completions (prompt)",
        code="no_tokenizer",
        param=param,
    )


class TokenIdsOnly:
    """A `srv.server.text.processor.TextProcessor` without text: outputs have none, and what needs one is refused."""

    has_tokenizer = False
    templates: tuple[str, ...] = ()
    affixes = SpecialTokenAffixes()
    has_chat_template = True  # so that a conversation is refused for the reason that matters

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], keep: int | None = None) -> list[EncodedPair]:
        raise no_tokenizer(None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise no_tokenizer(None)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        raise no_tokenizer(None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise no_tokenizer(None)

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        raise no_tokenizer("messages")

    def apply_template_of_request(
        self,
        source: str,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        raise no_tokenizer("messages")

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool,
        include_stop: bool,
        keep: tuple[str, ...] = (),
        regex: StopRegex | None = None,
    ) -> NoText:
        return NoText()

    def token_text(self, token: int) -> str:
        """The token's id, in the form that vLLM uses for tokens as ids."""
        return f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        return b""

    def vocabulary(self) -> Vocabulary | None:
        return None

    def close(self) -> None:
        """It holds nothing."""


class NoText:
    """A `Detokenizer` whose tokens have no text."""

    def __init__(self) -> None:
        self._count = 0

    def push(self, tokens: Sequence[int], final: bool) -> TextDelta:
        self._count += len(tokens)
        return TextDelta("", None, self._count)
