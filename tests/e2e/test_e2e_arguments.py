"""Every argument of the server has an effect: with two values of it, real servers answer differently.

There are two servers of a very small model with dummy weights: `plain` has the defaults, `other` another value of each
argument, some of them from a file. Arguments of the engine are tested in `tests/core/args/test_effects.py`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from e2e_support import REQUEST_S, Server, free_port, greedy, launch, launched, read_events, wait_until
from letters_model import ALPHABET, CONFIG, CONTEXT, write_tokenizer

from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = "a key for tests"
HELLO = [{"role": "user", "content": "a b"}]
TOKENS = [3, 1, 4, 1, 5]


class LockedServer(Server):
    """A server that listens on another address of this machine, and requires the key."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.2:{self.port}"

    def client(self, **more: Any) -> httpx.Client:
        return super().client(headers={"authorization": f"Bearer {KEY}"}, **more)


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    """The device under test, one slot, and a pool for two long requests."""
    pool = ("--max-running-requests", "1", "--max-total-tokens", str(2 * CONTEXT))
    return ("--device", srv_device, "--model-path", str(letters_model), "--load-format", "dummy", *pool)


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(tmp_path_factory.mktemp("plain") / "log", *common) as server:
        yield server


@pytest.fixture(scope="module")
def other(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("other")
    template = folder / "twice.jinja"
    template.write_text("{% for one in messages %}{{ one.content }} {{ one.content }}{% endfor %}")
    backwards = write_tokenizer(folder / "backwards", ALPHABET[::-1])
    marks = folder / "marks.json"
    fields = {"fim_begin_token": "x ", "fim_middle_token": " y ", "fim_end_token": " z", "fim_position": "middle"}
    marks.write_text(json.dumps(fields))
    config = folder / "serve.yaml"
    config.write_text(f"served_model_name: another\ncontext_length: 50000\nchat_template: {template}\n")
    arguments = (
        *("--config", str(config), "--tokenizer-path", str(backwards), "--host", "127.0.0.2", "--api-key", KEY),
        *("--max-queued-requests", "1", "--max-stop-strings", "1", "--max-request-bytes", "4096"),
        *("--log-level", "warning", "--is-embedding", "--pooling", "mean", "--enable-return-hidden-states"),
        *("--completion-template", str(marks)),
    )
    server = LockedServer((*common, *arguments), folder / "log")
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def reason(response: httpx.Response) -> tuple[int, str]:
    """The status, and the code of the error or the empty string."""
    return response.status_code, "" if response.is_success else response.json()["error"]["code"]


def test_config(plain: Server, other: Server) -> None:
    """Three of the arguments tested below come from the file, which the server reports as their source."""
    sources = [server.get("/get_server_info").json()["arguments"]["served_model_name"] for server in (plain, other)]
    assert "serve.yaml" in str(sources[1])
    assert "serve.yaml" not in str(sources[0])


@covers("host")
def test_host(plain: Server, other: Server) -> None:
    for server, there, not_there in ((plain, "127.0.0.1", "127.0.0.2"), (other, "127.0.0.2", "127.0.0.1")):
        assert httpx.get(f"http://{there}:{server.port}/health", timeout=5).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{not_there}:{server.port}/health", timeout=5)


def test_port(plain: Server, other: Server) -> None:
    """Each server answers only on its own port."""
    assert plain.port != other.port
    assert plain.health() == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{other.port}/health", timeout=5)


@covers("served_model_name")
def test_served_model_name(plain: Server, other: Server) -> None:
    assert (plain.model(), other.model()) == ("letters", "another")
    for server, name, unknown in ((plain, "letters", "another"), (other, "another", "letters")):
        assert reason(server.post("/v1/completions", model=name, prompt="a", max_tokens=1)) == (200, "")
        assert reason(server.post("/v1/completions", model=unknown, prompt="a", max_tokens=1))[0] == 404


@covers("context_length=50000")
def test_context_length(plain: Server, other: Server) -> None:
    prompt = [3] * 500
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 50_000, "ignore_eos": True}}
    assert reason(other.post("/generate", **body)) == (400, "context_length_exceeded")
    assert [server.get("/v1/models").json()["data"][0]["max_model_len"] for server in (plain, other)] == [100000, 50000]
    with running(plain, **body):
        pass  # the plain server accepts it


@covers("tokenizer_path")
def test_tokenizer_path(plain: Server, other: Server) -> None:
    tokens = [server.post("/tokenize", prompt="a b").json()["tokens"] for server in (plain, other)]
    assert tokens == [[0, 1], [25, 24]]


@covers("chat_template")
def test_chat_template(plain: Server, other: Server) -> None:
    counts = []
    for server in (plain, other):
        answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=1).json()
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts == [2, 4]


@covers("completion_template")
def test_completion_template(plain: Server, other: Server) -> None:
    body = {"prompt": "a b", "suffix": "c", "max_tokens": 1}
    assert reason(plain.post("/v1/completions", **body)) == (400, "no_fill_in_tokens")
    response = other.post("/v1/completions", **body, return_token_ids=True)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["prompt_token_ids"] == [25 - ord(letter) + ord("a") for letter in "xabycz"]


@covers("api_key")
def test_api_key(plain: Server, other: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{plain.base}/v1/completions", json=body, timeout=30).status_code == 200
    assert reason(httpx.post(f"{other.base}/v1/completions", json=body, timeout=30)) == (401, "invalid_api_key")
    assert reason(other.post("/v1/completions", **body)) == (200, "")


@covers("log_level=info", "log_level=warning")
def test_log_level(plain: Server, other: Server) -> None:
    for server in (plain, other):
        assert reason(server.post("/v1/completions", prompt="a", max_tokens=1)) == (200, "")
    for line in (" api INFO ", " engine INFO "):
        assert line in plain.log_text()
        assert line not in other.log_text()


@covers("max_request_bytes=16777216", "max_request_bytes=4096")
def test_max_request_bytes(plain: Server, other: Server) -> None:
    body = {"prompt": "a" * 5000, "max_tokens": 1}
    assert reason(plain.post("/v1/completions", **body)) == (200, "")
    assert reason(other.post("/v1/completions", **body))[0] == 413


@covers("max_stop_strings=16", "max_stop_strings=1")
def test_max_stop_strings(plain: Server, other: Server) -> None:
    for stop, status in ((["x"], 200), (["x", "y"], 400)):
        assert plain.post("/v1/completions", prompt="a", max_tokens=1, stop=stop).status_code == 200
        assert other.post("/v1/completions", prompt="a", max_tokens=1, stop=stop).status_code == status


def embeddings(server: Server, **fields: Any) -> list[list[float]]:
    """The embeddings of /v1/embeddings as the openai client reads them: by default it requests base64."""
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key=KEY, timeout=REQUEST_S, max_retries=0) as client:
        answer = client.embeddings.create(model=server.model(), **fields)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


@covers("is_embedding=true", "is_embedding=false", "endpoint:POST /v1/embeddings")
def test_is_embedding(plain: Server, other: Server) -> None:
    assert reason(plain.post("/v1/embeddings", input="a")) == (400, "embeddings_disabled")
    assert [server.get("/get_model_info").json()["is_embedding"] for server in (plain, other)] == [False, True]
    (whole,) = embeddings(other, input="a b c")
    (cut,) = embeddings(other, input="a b c", dimensions=4)
    assert [len(whole), len(cut)] == [CONFIG["hidden_size"], 4]
    assert [math.hypot(*vector) for vector in (whole, cut)] == [pytest.approx(1)] * 2
    assert embeddings(other, input="a b c", encoding_format="float") == [pytest.approx(whole, abs=1e-5)]
    assert reason(other.post("/v1/completions", prompt="a", max_tokens=1)) == (200, "")


@covers("pooling=mean", "pooling=last")
def test_pooling(other: Server, common: tuple[str, ...], tmp_path: Path) -> None:
    """Embeddings are the last hidden state of the prompt, or the mean of all."""
    states = hidden_states(other)
    with launched(tmp_path / "log", *common, "--is-embedding", "--pooling", "last") as last:
        for server, pooling, expected in ((other, "mean", np.mean(states, 0)), (last, "last", states[-1])):
            assert server.get("/get_model_info").json()["pooling"] == pooling
            (embedding,) = embeddings(server, input=TOKENS, extra_body={"normalize": False})
            assert embedding == pytest.approx(list(expected), rel=1e-3, abs=1e-3)
        texts = ["a b c", "d"]
        singles = [pytest.approx(embeddings(last, input=text)[0], abs=1e-5) for text in texts]
        assert embeddings(last, input=texts) == singles


def hidden_states(server: Server) -> np.ndarray:
    """The hidden states of TOKENS, float64 [tokens, hidden]."""
    params = {"max_new_tokens": 3, "ignore_eos": True}
    answer = server.generate(input_ids=TOKENS, sampling_params=params, return_hidden_states=True)
    prompt, *output = answer["meta_info"]["hidden_states"]
    assert np.shape(output) == (2, CONFIG["hidden_size"])
    return np.array(prompt)


@covers("enable_return_hidden_states=true", "enable_return_hidden_states=false")
def test_enable_return_hidden_states(plain: Server, other: Server) -> None:
    body = greedy("a b c", 1, return_hidden_states=True)
    assert reason(plain.post("/generate", **body)) == (400, "hidden_states_disabled")
    states = hidden_states(other)
    assert states.shape == (len(TOKENS), CONFIG["hidden_size"])
    assert hidden_states(other) == pytest.approx(states, rel=1e-3, abs=1e-3)  # although its prefix is cached now


@contextmanager
def running(server: Server, **body: Any) -> Iterator[threading.Thread]:
    """Run a request while the block runs; it is aborted at the end."""
    clients = [threading.Thread(target=server.post, args=("/generate",), kwargs=body, daemon=True)]
    clients[0].start()
    try:
        wait_until(lambda: server.metrics()["srv_requests_running"] == 1, 30, "the request runs")
        yield clients[0]
    finally:
        server.post("/abort_request", abort_all=True)
        clients[0].join(30)
    server.wait_pages_back()


def queued(server: Server) -> list[tuple[int, str]]:
    """The results of two more requests while one runs in the only slot and is then aborted."""
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        answers.append(reason(server.post("/generate", **greedy("a", 1))))

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    with running(server, **greedy("a", 40_000, rid="long")):
        clients[0].start()
        wait_until(lambda: server.metrics()["srv_requests_queued"] == 1, 30, "one request waits")
        clients[1].start()
        wait_until(
            lambda: bool(answers) or server.metrics()["srv_requests_queued"] == 2, 30, "the second waits or is refused"
        )
        server.post("/abort_request", rid="long")
        for client in clients:
            client.join(30)
    return answers


@covers("max_queued_requests=4096", "max_queued_requests=1")
def test_max_queued_requests(plain: Server, other: Server) -> None:
    assert queued(plain) == [(200, ""), (200, "")]
    assert queued(other) == [(503, "queue_full"), (200, "")]


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        pytest.param("60", "length", marks=covers("graceful_shutdown_seconds=60.0")),
        pytest.param("30", "length", marks=covers("graceful_shutdown_seconds=30.0")),
        pytest.param("0", "abort", marks=covers("graceful_shutdown_seconds=0.0")),
    ],
)
def test_graceful_shutdown_seconds(common: tuple[str, ...], tmp_path: Path, seconds: str, ends: str) -> None:
    """After SIGTERM, a server lets the request finish, and one without patience aborts it."""
    count = 90_000 if ends == "abort" else 1_000
    with launched(tmp_path / "log", *common, "--graceful-shutdown-seconds", seconds) as server:
        body = greedy("a", count, stream=True)
        with server.client() as client, client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            received = [next(lines)]  # so that it runs
            stopped = time.monotonic()
            server.terminate()
            received += lines
        assert server.wait() == 0, server.log_text()
        assert time.monotonic() - stopped < 55
    outputs = [event for event in read_events(received) if "meta_info" in event]
    assert outputs[-1]["meta_info"]["finish_reason"]["type"] == ends


@covers("engine_start_timeout_seconds=900.0", "engine_start_timeout_seconds=0.05")
def test_engine_start_timeout_seconds(common: tuple[str, ...], plain: Server) -> None:
    """The plain server has started within the default timeout; a launch with a very short one fails."""
    assert plain.health() == 200
    arguments = (*common, "--port", str(free_port()), "--engine-start-timeout-seconds", "0.05")
    status, text, _ = launch(*arguments)
    assert status == 1
    assert "the engine was not ready after 0.05 seconds" in text
    assert "--engine-start-timeout-seconds" in text
