"""The request log: what each request asks for when it is sent to the engine, and where its time went when it has ended.

Owns the lines and their levels. Must not know HTTP or the format of any protocol.

    --log-requests                         start and end of every request, as JSON, at four levels of detail
    --enable-request-time-stats-logging    one line per request with the seconds of each stage
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import msgspec

from srv.args.groups.observe import ObserveArgs
from srv.server.observe.records import SequenceRecord
from srv.server.observe.redaction import LONGEST, redact
from srv.server.text.processor import TextProcessor
from srv.types import RequestSpec

logger = logging.getLogger("srv.requests")

METADATA, PARAMETERS, BEGINNING, EVERYTHING = range(4)
SHOWN_TOKENS, SHOWN_CHARACTERS = 512, 2048  # of prompt and output at the level BEGINNING


class RequestLog:
    """level: METADATA to EVERYTHING; None: requests are not logged. stages: whether the seconds of each stage are.
    keys: those of the server."""

    def __init__(self, text: TextProcessor, level: int | None, stages: bool, keys: Sequence[str] = ()) -> None:
        self._text, self._level, self._stages, self._keys = text, level, stages, keys
        self.shows_text = level is not None and level >= BEGINNING

    def started(self, spec: RequestSpec) -> None:
        if self._level is None:
            return
        shown: dict[str, object] = {"rid": spec.id, "prompt_tokens": len(spec.tokens)}
        if self._level >= PARAMETERS:
            shown["params"] = msgspec.to_builtins(spec.params)
        if self.shows_text:
            shown["prompt"] = self._prompt(spec.tokens)
        self._write("received", shown)

    def _prompt(self, tokens: Sequence[int]) -> str | list[int]:
        if not self._text.has_tokenizer:
            return list(tokens if self._level == EVERYTHING else tokens[:SHOWN_TOKENS])
        if self._level == EVERYTHING or len(tokens) <= SHOWN_TOKENS:
            return self._shorten(self._text.decode(tokens, False))
        # A key of the server has at most as many tokens as bytes.
        lookahead = max(LONGEST, *(len(key.encode()) for key in self._keys), 0)
        text = self._text.decode(tokens[: SHOWN_TOKENS + lookahead], False)
        return self._shorten(text, len(self._text.decode(tokens[:SHOWN_TOKENS], False)))

    def ended(self, record: SequenceRecord) -> None:
        if self._level is not None:
            shown: dict[str, object] = {
                "rid": record.id,
                "finish_reason": record.reason.value,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "seconds": round(record.ended - record.arrival, 4),
            }
            if self.shows_text:
                shown["output"] = self._shorten("".join(record.texts or ()))
            self._write("ended", shown)
        if self._stages:
            stages = {name: round(max(0.0, end - begin), 4) for name, (begin, end) in record.stages().items()}
            total = round(record.ended - record.arrival, 4)
            self._write("time of", {"rid": record.id, **stages, "total": total})

    def _shorten(self, text: str, cut: int | None = None) -> str:
        """The redacted text, of which no more than `cut` characters are shown."""
        if self._level != EVERYTHING and len(text) > SHOWN_CHARACTERS:
            cut = SHOWN_CHARACTERS if cut is None else min(cut, SHOWN_CHARACTERS)
        shown = redact(text, self._keys, cut)
        return shown if cut is None else f"{shown}... (cut)"

    def _write(self, event: str, shown: dict[str, object]) -> None:
        # JSON escapes line breaks, with which a prompt could forge further lines.
        logger.info("%s request %s", event, json.dumps(self._redacted(shown)))

    def _redacted(self, value: object) -> object:
        """With all texts redacted: a client chooses ids and grammars as well."""
        match value:
            case str():
                return redact(value, self._keys)
            case dict():
                return {name: self._redacted(member) for name, member in value.items()}
            case list() | tuple():
                return [self._redacted(element) for element in value]
        return value


def request_log(observe: ObserveArgs, text: TextProcessor, keys: Sequence[str] = ()) -> RequestLog | None:
    """The log that the arguments ask for; None if they ask for none. `keys`: of the server, which it never shows."""
    if not (observe.log_requests or observe.enable_request_time_stats_logging):
        return None
    logger.setLevel(logging.INFO)  # an argument asks for these lines, whatever --log-level is
    level = observe.log_requests_level if observe.log_requests else None
    return RequestLog(text, level, observe.enable_request_time_stats_logging, keys)
