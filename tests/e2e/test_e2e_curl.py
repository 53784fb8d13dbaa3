"""The `curl` binary as the client of a real server: valid and invalid bytes on the wire."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_support import Server, read_events, served

from srv_matrix.pytest_plugin import covers

CURL = shutil.which("curl")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(CURL is None, reason="there is no curl binary here; install curl to run these tests"),
]

SERVER_ARGUMENTS = ("--max-request-bytes", "4096", "--max-running-requests", "8", "--max-total-tokens", "16384")
KEY = "open-sesame"
COMPLETIONS = "/v1/completions"


def curl(server: Server, path: str, *options: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one request; a `body` is posted as JSON."""
    command = [str(CURL), "--silent", "--show-error", "--no-buffer", "--max-time", "60", "--include", *options]
    if body is not None:
        command += ["--header", "Content-Type: application/json", "--header", "Expect:", "--data-binary", "@-"]
    process = subprocess.run(
        [*command, server.base + path], input=body or b"", capture_output=True, timeout=90, check=False
    )
    assert process.returncode == 0, process.stderr.decode()
    head, _, content = process.stdout.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, content


def error_of(content: bytes) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's format."""
    error: dict[str, Any] = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@covers("endpoint:GET /health")
def test_health_and_models(server: Server) -> None:
    status, _, content = curl(server, "/health")
    assert (status, json.loads(content)) == (200, {"status": "ok"})
    status, headers, content = curl(server, "/v1/models")
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert json.loads(content)["data"][0]["id"] == server.model()


def test_stream_is_server_sent_events_to_the_end_mark(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0, "stream": True}
    status, headers, content = curl(server, "/v1/chat/completions", body=json.dumps(body).encode())
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert content.endswith(b"data: [DONE]\n\n")
    *chunks, end = read_events(content.decode().split("\n"))
    assert end == "[DONE]"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@covers("endpoint:POST /v1/messages", "endpoint:POST /v1/messages/count_tokens")
def test_a_message_of_anthropics_api(server: Server) -> None:
    asked = {"model": server.model(), "messages": [{"role": "user", "content": "Name a colour."}]}
    body = {**asked, "max_tokens": 6, "temperature": 0}
    headers = ("--header", "x-api-key: any", "--header", "anthropic-version: 2023-06-01")
    assert curl(server, "/", "--head")[0] == 200
    status, sent, content = curl(server, "/v1/messages?beta=true", *headers, body=json.dumps(body).encode())
    message = json.loads(content)
    assert (status, message["stop_reason"], message["usage"]["output_tokens"]) == (200, "max_tokens", 6)
    assert sent["request-id"].startswith("req_")
    status, _, content = curl(server, "/v1/messages", *headers, body=json.dumps({**body, "stream": True}).encode())
    lines = content.decode().split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [f"event: {event['type']}" for event in events] == [line for line in lines if line.startswith("event: ")]
    parts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == message["content"][0]["text"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    counted = json.loads(curl(server, "/v1/messages/count_tokens", *headers, body=json.dumps(asked).encode())[2])
    used = message["usage"]
    assert counted["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


def test_stream_is_sent_event_by_event(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    command = [str(CURL), "--silent", "--no-buffer", "--max-time", "60", "--json", json.dumps(body)]
    with subprocess.Popen([*command, server.base + COMPLETIONS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        still_running = server.metrics()["srv_requests_running"]
        process.kill()  # the client disconnects in the middle of its stream
    assert first.startswith(b"data: {")
    assert still_running == 1
    server.wait_pages_back()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "a"', "invalid_json"),
        (b"not json", "invalid_json"),
        (b"", "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "\xff\xfe\xfa"}', "invalid_utf8"),
        (b'["prompt"]', "invalid_type"),
        (b'{"prompt": "a", "max_tokens": "many"}', "invalid_type"),
        (b'{"prompt": "a", "max_tokens": -5}', "invalid_value"),
        (b'{"prompt": "a", "suffix": "b"}', "no_fill_in_tokens"),
        (b'{"prompt": "a", "max_tokns": 5}', "unknown_field"),
    ],
)
def test_bad_body_is_a_400(server: Server, body: bytes, code: str) -> None:
    status, headers, content = curl(server, COMPLETIONS, body=body)
    assert status == 400
    assert headers["content-type"] == "application/json"
    error = error_of(content)
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("declared", [True, False], ids=["with content-length", "chunked"])
def test_body_over_the_limit_is_a_413(server: Server, declared: bool) -> None:
    options = () if declared else ("--header", "Transfer-Encoding: chunked")
    body = json.dumps({"prompt": "a" * 10_000}).encode()
    status, headers, content = curl(server, COMPLETIONS, *options, body=body)
    assert status == 413
    assert headers["connection"] == "close"
    error = error_of(content)
    assert error["code"] == "body_too_large"
    assert "4096" in error["message"]
    assert curl(server, "/health")[0] == 200


def test_a_body_within_the_limit_passes(server: Server) -> None:
    body = json.dumps({"prompt": "a " * 1000, "max_tokens": 1}).encode()
    assert curl(server, COMPLETIONS, body=body)[0] == 200


def test_unknown_path_and_wrong_method(server: Server) -> None:
    status, _, content = curl(server, "/v2/everything")
    assert (status, error_of(content)["code"]) == (404, "unknown_path")
    status, headers, content = curl(server, COMPLETIONS)
    assert (status, error_of(content)["code"]) == (405, "method_not_allowed")
    assert headers["allow"] == "POST"
    status, _, content = curl(server, "/health", "--request", "DELETE")
    assert (status, error_of(content)["code"]) == (405, "method_not_allowed")


def test_bytes_that_are_not_http_do_not_end_the_server(server: Server) -> None:
    process = subprocess.run(
        [str(CURL), "--silent", "--max-time", "10", "--include", "--request", "\x01\x02 /", server.base],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert process.stdout.startswith(b"HTTP/1.1 400")
    assert curl(server, "/health")[0] == 200


# ---- with an API key


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("locked") / "log"
    with served(
        log, "--device", "cpu", "--api-key", KEY, "--log-level", "debug", "--max-total-tokens", "8192"
    ) as running:
        yield running


def test_without_the_key_nothing_is_revealed(locked: Server) -> None:
    for path, body in (("/v1/models", None), ("/get_server_info", None), (COMPLETIONS, b'{"prompt": "a"}')):
        for options in ((), ("--header", "Authorization: Bearer wrong")):
            status, headers, content = curl(locked, path, *options, body=body)
            assert status == 401, path
            assert headers["www-authenticate"] == "Bearer"
            assert error_of(content)["code"] == "invalid_api_key"


def test_with_the_key_everything_works(locked: Server) -> None:
    bearer = ("--header", f"Authorization: Bearer {KEY}")
    status, _, content = curl(locked, COMPLETIONS, *bearer, body=b'{"prompt": "Once", "max_tokens": 2}')
    assert status == 200
    assert json.loads(content)["usage"]["completion_tokens"] == 2


def test_probes_need_no_key(locked: Server) -> None:
    assert curl(locked, "/health")[0] == 200
    assert curl(locked, "/metrics")[0] == 200


def test_the_key_is_shown_nowhere(locked: Server) -> None:
    _, _, content = curl(locked, "/get_server_info", "--header", f"Authorization: Bearer {KEY}")
    assert json.loads(content)["arguments"]["api_key"]["value"] != KEY
    assert KEY.encode() not in content
    assert KEY not in locked.log_text()
