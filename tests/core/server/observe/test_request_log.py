"""The request log redacts what looks like a credential, cannot be forged, and shows what its level allows."""

from __future__ import annotations

import json
import logging

import pytest
from every import every

from srv.args.groups.observe import ObserveArgs
from srv.server.observe.records import SequenceRecord
from srv.server.observe.redaction import LONGEST, REDACTED, redact
from srv.server.observe.request_log import BEGINNING, SHOWN_CHARACTERS, SHOWN_TOKENS, RequestLog, request_log
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
        "AIza" + "SyA-1_2b" * 4 + "abc",
        "ya29.a0AfH6SMBx-abcdefghijklmnop",
        "password=hunter22",
        'password: "hunter22',
        "API_KEY = abcd1234",
        "postgres://user:hunter2@",
        "https://:token@",
        "https://abcd1234@",
        "Authorization: Basic dXNlcjpwYXNz",
        'authorization": "Basic dXNlcjpwYXNz',
        "GOCSPX-abcdefghijklmnop",
        "xoxs-abcdefghijklmnop",
        "token=abcd1234",
        "passphrase: hunter22",
        """password='ab"cd ef'""",
        'password": "hunt er22 x"',
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nabc",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc\n-----END PGP PRIVATE KEY BLOCK-----",
        "refresh_token=abcd1234",
        "session_token: abcd1234",
        "idToken: abcd1234",
        "AccountKey=abcd1234==",
        "AccessKey=abcd1234=",
        r"password\": \"hunt er22\"",
        r"password\\\": \\\"hunt er22\\\"",
        r"password\": \"hunt\\\"er 22\"",
        r'password="abc\"d ef"',
        "ASIAABCDEFGHIJKLMNOP",
        "ghs_16C7e42F292c6912E771",
        "gho_16C7e42F292c6912E771",
        "npm_" + "aB1" * 12,
        "postgres://user:hun@ter22@",
        "postgres://user:hun@te/r22@",
        "https://user:hunt/er22@",
        "eyJhbGciOiJI.eyJzdWIiOiIx",
        "eyJhbGciOiJIUzI1NiJ9",
    ],
)
def test_credentials_are_redacted(secret: str) -> None:
    assert redact(f"use {secret}") == f"use {REDACTED}"


@every(
    "text",
    [
        "Cookie: a=b; sid=hunter22",
        "Cookie: flag; sid=hunter22",
        'Cookie: a="hunter22 c"; sid=hunter22',
        "Set-Cookie: sid=hunter22; Path=/; HttpOnly\nnext",
        "curl -H 'Cookie: a=b; sid=hunter22' next",
        '{"Cookie": "sid=hunter22==", "next": 1}',
        r"{\"set-cookie\": \"sid=hunter22; Path=/\", \"next\": 1}",
        "Proxy-Authorization: Basic hunter22",
        'Authorization: Digest username="hunter22", realm="x", response="hunter22"',
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter22/eu, SignedHeaders=host;x, Signature=hunter22",
        "X-Auth-Token: hunter22",
        "X-Amz-Security-Token: hunter22",
        "Ocp-Apim-Subscription-Key: hunter22",
        "GITHUB_TOKEN=hunter22",
        '{"api_token": "hunter22", "next": 1}',
        '{"apiToken": "hunter22", "next": 1}',
        '{"tokenValue": "hunter22", "next": 1}',
        '{"csrfmiddlewaretoken": "hunter22", "next": 1}',
        '{"secret_value": "hunter22", "next": 1}',
        '{"secretKey": "hunter22", "next": 1}',
        '{"client_secret_id": "hunter22", "next": 1}',
        '{"api_keys": ["hunter22", "hunter22"], "next": 1}',
        '{"secrets": [\n "hunter22"\n], "next": 1}',
        '{"credential": "hunter22", "next": 1}',
    ],
)
def test_headers_and_values_of_json_are_redacted(text: str) -> None:
    shown = redact(text)
    assert REDACTED in shown
    assert "hunter22" not in shown
    assert ("next" in shown) == ("next" in text)


def test_ordinary_text_is_kept() -> None:
    text = "The bearer of this letter asks for disk-space, task-list-items-in-order, a key and max_token=4096."
    text += " See https://example.org/a@b, a basic introduction by its authorization."
    text += (
        " https://example.org:8080/a@b npm_config_registry Asiapacificeconomicsummit eyJhbGciOiJI primary_key: abcde"
    )
    text += ' Cookie: 3 eggs and sugar; eos_token_id=1234 maxToken: 4096 "pad_token": "<pad>" tokenizer: gpt2-large'
    assert redact(text) == text


def log_of(level: int, prompt: str, output: list[str], caplog: pytest.LogCaptureFixture, rid: str = "r") -> list[str]:
    log = RequestLog(ByteTokenizer(), level, False, ["the server's key", "key"])
    spec = RequestSpec(id=rid, tokens=tuple(prompt.encode()), params=SamplingParams(max_tokens=5))
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


def test_keys_of_the_server_are_redacted_wherever_a_client_sends_them(caplog: pytest.LogCaptureFixture) -> None:
    text = "I send the server's key as a key"
    received, ended = log_of(3, text, [text], caplog, rid="password=hunter22")
    assert received.count(REDACTED) == 2
    assert "server's" not in received + ended
    assert "hunter22" not in received + ended
    assert json.loads(ended.partition("request ")[2])["output"] == f"I send {REDACTED} as a key"


@pytest.mark.parametrize(
    "secret",
    ["key-of-this-server", "eyJhbGciOiJI." + "eyJzdWIiOiIx" * 9 + ".c2lnbmF0dXJl", "postgres://user:hunter22@"],
)
def test_a_cut_shows_no_part_of_a_secret(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(ByteTokenizer(), BEGINNING, False, ["key-of-this-server"])
    params = SamplingParams(max_tokens=5)
    with caplog.at_level(logging.INFO, "srv.requests"):
        for before in range(SHOWN_TOKENS - len(secret) - 1, SHOWN_TOKENS + 1):
            text = "," * before + f" {secret} " + "x" * 3000
            log.started(RequestSpec(id="r", tokens=tuple(text.encode()), params=params))
    for number, record in enumerate(caplog.records):
        prompt = json.loads(record.getMessage().partition("request ")[2])["prompt"]
        assert prompt.removesuffix("... (cut)").strip(", ") in ("", REDACTED, f"{REDACTED} x"), number


def test_what_follows_a_cut_decides_what_is_hidden() -> None:
    assert redact("a key-of-x b", ["key-of-x"], cut=5) == f"a {REDACTED}"
    assert redact("a key-of-x b", ["key-of-x"], cut=2) == "a "
    assert redact("a key-of-x b", ["key-of-x"], cut=11) == f"a {REDACTED} "
    assert LONGEST > SHOWN_TOKENS


def test_text_of_any_form_is_redacted_in_linear_time() -> None:
    """No assertion on seconds: with a quadratic expression this would run for minutes."""
    for part in (
        "eyJ-",
        "a.",
        "a://",
        "bearer  ",
        "password",
        "a:",
        "token=",
        "authorization:  ",
        "-----BEGIN ",
        "a://:",
        'token="',
        'token=\\"',
        "a://b@",
        "cookie:",
        'cookie: a="',
        "authorization: a b=c,",
        "max_token_",
        'secrets: ["',
        "\\",
    ):
        assert redact(f"{part * 50_000} password=hunter22").endswith(REDACTED)
