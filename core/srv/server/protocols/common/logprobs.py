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


class TokenIdTexts:
    """Shows each token as `token_id:ID` (vLLM), which tells tokens with the same text apart."""

    def __init__(self, text: TextProcessor) -> None:
        self.token_bytes, self.decode = text.token_bytes, text.decode

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"


TokenTexts = TextProcessor | TokenIdTexts


def token_texts(text: TextProcessor, as_ids: bool | None) -> TokenTexts:
    """`as_ids`: the field return_tokens_as_token_ids."""
    return TokenIdTexts(text) if as_ids else text


def _candidates(item: TokenLogprob, token_ids: Sequence[int]) -> dict[int, float]:
    """The most likely tokens, and those that the request lists."""
    return {**dict(item.top), **dict(zip(token_ids, item.listed, strict=True))}


def chat_logprobs(
    text: TokenTexts, logprobs: Sequence[TokenLogprob], token_ids: Sequence[int] = ()
) -> dict[str, object]:
    """OpenAI's format for chat completions. `token_ids`: the ids of `SamplingOptions.logprob_token_ids`."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": text.token_text(token), "logprob": finite(logprob), "bytes": list(text.token_bytes(token))}

    content = [
        {
            **entry(item.token, item.logprob),
            "top_logprobs": [entry(*candidate) for candidate in _candidates(item, token_ids).items()],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _display_text(text: TokenTexts, token: int) -> str:
    """The text of a token in OpenAI's completions format, or its bytes if they are not valid UTF-8 by themselves."""
    token_text = text.token_text(token)
    if "\ufffd" not in token_text:
        return token_text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.token_bytes(token))


class CompletionLogprobs:
    """OpenAI's format for completions, built incrementally; stores the text offset between calls.

    `listed`: as in `chat_logprobs`.
    """

    def __init__(self, text: TokenTexts, offset: int = 0, token_ids: Sequence[int] = ()) -> None:
        self._text, self._listed = text, token_ids
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
        """The most likely tokens and the listed ones, plus the sampled one if it is not among them."""
        pairs = {**_candidates(item, self._listed), item.token: item.logprob}
        return {_display_text(self._text, token): finite(logprob) for token, logprob in pairs.items()}


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
