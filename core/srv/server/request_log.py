"""The request log: what each request asks for when it is sent to the engine, and where its time went when it has ended.

Owns the lines, their levels, and what is redacted in them. Must not know HTTP or the format of any protocol.

    --log-requests                         start and end of every request, as JSON, at four levels of detail
    --enable-request-time-stats-logging    one line per request with the seconds of each stage
"""

from __future__ import annotations

import json
import logging
import re

import msgspec

from srv.args.groups.observe import ObserveArgs
from srv.server.records import SequenceRecord
from srv.server.text.processor import TextProcessor
from srv.types import RequestSpec

logger = logging.getLogger("srv.requests")

METADATA, PARAMETERS, BEGINNING, EVERYTHING = range(4)
SHOWN_TOKENS, SHOWN_CHARACTERS = 512, 2048  # of prompt and output at the level BEGINNING
# What looks like a credential in a prompt or an output: bearer tokens, and keys of the usual forms.
_SECRETS = re.compile(
    r"(?i)\bbearer\s+[\w.~+/=-]{8,}|\b(?:sk|pk|rk|hf|ghp|gho|github_pat|xox[abp]|glpat)[-_][\w-]{12,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
REDACTED = "[redacted]"


def redact(text: str) -> str:
    """The text without what looks like a credential."""
    return _SECRETS.sub(REDACTED, text)


class RequestLog:
    """level: METADATA to EVERYTHING; None: requests are not logged. stages: whether the seconds of each stage are."""

    def __init__(self, text: TextProcessor, level: int | None, stages: bool) -> None:
        self._text, self._level, self._stages = text, level, stages
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
        text = redact(text)
        if self._level == EVERYTHING or len(text) <= SHOWN_CHARACTERS:
            return text
        return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"

    @staticmethod
    def _write(event: str, shown: dict[str, object]) -> None:
        # JSON escapes line breaks, with which a prompt could forge further lines.
        logger.info("%s request %s", event, json.dumps(shown))


def request_log(observe: ObserveArgs, text: TextProcessor) -> RequestLog | None:
    """The log that the arguments ask for; None if they ask for none."""
    if not (observe.log_requests or observe.enable_request_time_stats_logging):
        return None
    logger.setLevel(logging.INFO)  # an argument asks for these lines, whatever --log-level is
    level = observe.log_requests_level if observe.log_requests else None
    return RequestLog(text, level, observe.enable_request_time_stats_logging)
