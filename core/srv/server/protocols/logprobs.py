"""Log-probabilities in the shapes of the protocols: chat, completions, prompt, native.

Must not know requests or HTTP.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from srv.server.text.processor import TextProcessor
from srv.types import TokenLogprob

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(text: TextProcessor, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """OpenAI's chat formatter."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": text.token_text(token), "logprob": finite(logprob), "bytes": list(text.token_bytes(token))}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _name(text: TextProcessor, token: int) -> str:
    """Text of a token as the completions shape shows it: one that is no text by itself as its bytes."""
    shown = text.token_text(token)
    if "\ufffd" not in shown:
        return shown
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.token_bytes(token))


class CompletionLogprobs:
    """OpenAI's completions formatter, part by part; keeps the place in the text between the parts."""

    def __init__(self, text: TextProcessor, offset: int = 0) -> None:
        self._text = text
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def part(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, list[object]]:
        """`logprobs[i]` belongs to `tokens[i]`; None for the first token of a prompt."""
        offsets: list[object] = []
        for token in tokens:
            offsets.append(self._offset)
            if self._text.decode([token], skip_special_tokens=True):
                self._offset += len(self._decoder.decode(self._text.token_bytes(token)))
        return {
            "tokens": [_name(self._text, token) for token in tokens],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in logprobs],
            "top_logprobs": [None if one is None else self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one even if it is not among them."""
        pairs = (*one.top, (one.token, one.logprob))
        return {_name(self._text, token): finite(logprob) for token, logprob in pairs}


def prompt_logprobs(
    text: TextProcessor, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[str, dict[str, object]] | None]:
    """One entry a prompt token (None where there is none: the first), as vLLM's field of this name."""
    entries: list[dict[str, dict[str, object]] | None] = [None] * (len(prompt) - len(logprobs))
    for one in logprobs:
        known = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
        known.setdefault(one.token, (one.logprob, one.rank))
        entries.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": text.token_text(token)}
                for token, (logprob, rank) in known.items()
            }
        )
    return entries


NativeEntry = tuple[float | None, int, str | None]


def native_logprobs(text: TextProcessor | None, logprobs: Sequence[TokenLogprob]) -> list[NativeEntry]:
    """(logprob, token id, text) triples, as SGLang's; without `text` the third is null."""
    return [native_entry(text, one.token, one.logprob) for one in logprobs]


def native_top(text: TextProcessor | None, logprobs: Sequence[TokenLogprob]) -> list[list[NativeEntry] | None]:
    return [[native_entry(text, token, logprob) for token, logprob in one.top] for one in logprobs]


def native_entry(text: TextProcessor | None, token: int, logprob: float | None) -> NativeEntry:
    shown = None if text is None else text.token_text(token)
    return (None if logprob is None else finite(logprob), token, shown)
