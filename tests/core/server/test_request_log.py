"""The request log redacts what looks like a credential, cannot be forged, and shows what its level allows."""

from __future__ import annotations

import json
import logging

import pytest

from srv.args.groups.observe import ObserveArgs
from srv.server.records import SequenceRecord
from srv.server.request_log import BEGINNING, REDACTED, SHOWN_CHARACTERS, RequestLog, redact, request_log
from srv.server.text.token_ids import TokenIdsOnly
from srv.testing.fake_engine import ByteTokenizer
from srv.types import FinishReason, RequestSpec, SamplingParams


@pytest.mark.parametrize(
    "secret",
    [
        "Bearer abcdefgh12345678",
        "sk-proj-abcdefghijklmnop",
        "hf_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nabc",
    ],
)
def test_credentials_are_redacted(secret: str) -> None:
    assert redact(f"use {secret}") == f"use {REDACTED}"


def test_ordinary_text_is_kept() -> None:
    text = "The bearer of this letter asks for disk-space, task-list-items-in-order and a key."
    assert redact(text) == text


def log_of(level: int, prompt: str, output: list[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    log = RequestLog(ByteTokenizer(), level, stages=False)
    spec = RequestSpec(id="r", tokens=tuple(prompt.encode()), params=SamplingParams(max_tokens=5))
    with caplog.at_level(logging.INFO, "srv.requests"):
        log.started(spec)
        log.ended(SequenceRecord("r", 1.0, spec=spec, ended=2.0, reason=FinishReason.STOP, texts=output))
    return [record.getMessage() for record in caplog.records]


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    long = "x" * (2 * SHOWN_CHARACTERS)
    for level, keys in ((0, set()), (1, {"params"}), (2, {"params", "prompt"}), (3, {"params", "prompt"})):
        caplog.clear()
        received, ended = log_of(level, long, [long], caplog)
        shown = json.loads(received.partition("request ")[2])
        assert shown.keys() == {"rid", "prompt_tokens"} | keys
        output = json.loads(ended.partition("request ")[2]).get("output")
        assert [output is None, output == long] == [level < 2, level == 3]
        assert level != 2 or (len(output) < len(long) and len(shown["prompt"]) < len(long))


def test_a_prompt_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    for line in log_of(3, "a\n2026 api INFO ended request {}", ["b\r\nc", "\x1b[2J"], caplog):
        assert line.isprintable()


def test_nothing_is_made_unless_it_is_asked_for() -> None:
    assert request_log(ObserveArgs(), ByteTokenizer()) is None


def test_without_a_tokenizer_token_ids_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(TokenIdsOnly(100), BEGINNING, stages=False)
    with caplog.at_level(logging.INFO, "srv.requests"):
        log.started(RequestSpec(id="r", tokens=(7, 8), params=SamplingParams(max_tokens=5)))
    assert '"prompt": [7, 8]' in caplog.text
