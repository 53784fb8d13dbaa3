"""Log-probabilities in the formats of the protocols: chat, completions, prompt, native.

Must not know requests or HTTP.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from srv.server.text.processor import TextProcessor
from srv.types import TokenLogprob

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def chat_logprobs(text: TextProcessor, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """OpenAI's format for chat completions."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": text.token_text(token), "logprob": finite(logprob), "bytes": list(text.token_bytes(token))}

    content = [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _display_text(text: TextProcessor, token: int) -> str:
    """The text of a token in OpenAI's completions format, or its bytes if they are not valid UTF-8 by themselves."""
    token_text = text.token_text(token)
    if "\ufffd" not in token_text:
        return token_text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.token_bytes(token))


class CompletionLogprobs:
    """OpenAI's format for completions, built incrementally; stores the text offset between calls."""

    def __init__(self, text: TextProcessor, offset: int = 0) -> None:
        self._text = text
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, list[object]]:
        """`logprobs[i]` belongs to `tokens[i]`; None for the first token of a prompt."""
        offsets: list[object] = []
        for token in tokens:
            offsets.append(self._offset)
            if self._text.decode([token], skip_special_tokens=True):
                self._offset += len(self._decoder.decode(self._text.token_bytes(token)))
        return {
            "tokens": [_display_text(self._text, token) for token in tokens],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in logprobs],
            "top_logprobs": [None if item is None else self._top(item) for item in logprobs],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, plus the sampled one if it is not among them."""
        pairs = (*item.top, (item.token, item.logprob))
        return {_display_text(self._text, token): finite(logprob) for token, logprob in pairs}


def prompt_logprobs(
    text: TextProcessor, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[str, dict[str, object]] | None]:
    """One entry per prompt token (None without a log-probability: the first), like vLLM's field of this name."""
    entries: list[dict[str, dict[str, object]] | None] = [None] * (len(prompt) - len(logprobs))
    for item in logprobs:
        candidates = {token: (logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)}
        candidates.setdefault(item.token, (item.logprob, item.rank))
        entries.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": text.token_text(token)}
                for token, (logprob, rank) in candidates.items()
            }
        )
    return entries


NativeEntry = tuple[float | None, int, str | None]


def native_logprobs(text: TextProcessor | None, logprobs: Sequence[TokenLogprob]) -> list[NativeEntry]:
    """(logprob, token id, text) triples like SGLang's; without `text` the third is null."""
    return [native_entry(text, item.token, item.logprob) for item in logprobs]


def native_top_logprobs(text: TextProcessor | None, logprobs: Sequence[TokenLogprob]) -> list[list[NativeEntry] | None]:
    return [[native_entry(text, token, logprob) for token, logprob in item.top] for item in logprobs]


def native_listed_logprobs(
    text: TextProcessor | None, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[list[NativeEntry] | None]:
    """Entries of the tokens `ids` at each position."""
    return [
        [native_entry(text, token, logprob) for token, logprob in zip(ids, item.listed, strict=True)]
        for item in logprobs
    ]


def native_entry(text: TextProcessor | None, token: int, logprob: float | None) -> NativeEntry:
    token_text = None if text is None else text.token_text(token)
    return (None if logprob is None else finite(logprob), token, token_text)
