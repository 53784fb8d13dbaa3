"""The request log: what each request asks for when it is sent to the engine, and where its time went when it has ended.

Owns the lines, their levels, and what is redacted in them. Must not know HTTP or the format of any protocol.

    --log-requests                         start and end of every request, as JSON, at four levels of detail
    --enable-request-time-stats-logging    one line per request with the seconds of each stage
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence

import msgspec

from srv.args.groups.observe import ObserveArgs
from srv.server.records import SequenceRecord
from srv.server.text.processor import TextProcessor
from srv.types import RequestSpec

logger = logging.getLogger("srv.requests")

METADATA, PARAMETERS, BEGINNING, EVERYTHING = range(4)
SHOWN_TOKENS, SHOWN_CHARACTERS = 512, 2048  # of prompt and output at the level BEGINNING
# What looks like a credential: bearer tokens, keys of the usual forms, and values that are named as such. Repetitions
# are bounded, or begin where the repeated characters do, so that no text takes a time that grows with its square.
_SECRETS = re.compile(
    r"(?i)\bauthorization[\"']?\s{0,9}[=:]\s{0,9}[\"']?(?:\w{1,20}\s{1,9})?[^\s\"',;]{4,}|\bbearer\s{1,9}[\w.~+/=-]{8,}"
    r"|\b(?:sk|pk|rk|hf|ghp|gho|github_pat|xox[abceprs]|glpat|GOCSPX)[-_][\w-]{12,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|\b[a-z][a-z0-9+.-]{0,19}://[^\s/@]{1,512}@"
    r"|(?:password|passwd|pwd|passphrase|secret|\btoken|api[-_]?key|(?:access|auth)[-_](?:key|token))[\"']?\s{0,9}[=:]\s{0,9}"
    r"(?:\"[^\"\n]{1,256}\"|'[^'\n]{1,256}'|[\"']?[^\s\"'&,;]{4,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
REDACTED = "[redacted]"
MIN_KEY = 6  # characters of a key of the server that is redacted: a shorter one is part of ordinary words


def redact(text: str, keys: Sequence[str] = ()) -> str:
    """The text without what looks like a credential, and without these keys."""
    for key in sorted(keys, key=len, reverse=True):
        if len(key) >= MIN_KEY:
            text = text.replace(key, REDACTED)
    return _SECRETS.sub(REDACTED, text)


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
            tokens = spec.tokens if self._level >= EVERYTHING else spec.tokens[:SHOWN_TOKENS]
            known = self._text.has_tokenizer
            shown["prompt"] = self._shorten(self._text.decode(tokens, False)) if known else list(tokens)
        self._write("received", shown)

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

    def _shorten(self, text: str) -> str:
        text = redact(text, self._keys)  # before it is cut: a part of a key has no form
        if self._level == EVERYTHING or len(text) <= SHOWN_CHARACTERS:
            return text
        return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"

    def _write(self, event: str, shown: dict[str, object]) -> None:
        # JSON escapes line breaks, with which a prompt could forge further lines.
        logger.info("%s request %s", event, json.dumps(self._redacted(shown)))

    def _redacted(self, value: object) -> object:
        """With all texts redacted: a client chooses ids and grammars as well."""
        match value:
            case str():
                return redact(value, self._keys)
            case dict():
                return {name: self._redacted(each) for name, each in value.items()}
            case list() | tuple():
                return [self._redacted(each) for each in value]
        return value


def request_log(observe: ObserveArgs, text: TextProcessor, keys: Sequence[str] = ()) -> RequestLog | None:
    """The log that the arguments ask for; None if they ask for none. `keys`: of the server, which it never shows."""
    if not (observe.log_requests or observe.enable_request_time_stats_logging):
        return None
    logger.setLevel(logging.INFO)  # an argument asks for these lines, whatever --log-level is
    level = observe.log_requests_level if observe.log_requests else None
    return RequestLog(text, level, observe.enable_request_time_stats_logging, keys)
