"""The format of replies on real servers: chosen by the chat template, or set by arguments.

The model is very small and has dummy weights. Some tokens of its tokenizer are whole replies, and a bias makes the
model write one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e_support import Server, launched
from letters_model import ALPHABET, write_model
from tokenizers import Tokenizer, models

from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOOLS = [{"type": "function", "function": {"name": "now"}}]
MARKED, PLAIN, THOUGHT = 3, 4, 5
REPLIES = {
    MARKED: '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    PLAIN: '{"name": "now", "parameters": {}}',
    THOUGHT: "<think>hm</think>yes",
}
TEMPLATE = '{% for one in messages %}{{ one.content }}{% endfor %}{# <tool_call> {"arguments"} <think> #}'


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory, srv_device: str) -> tuple[str, ...]:
    folder = write_model(tmp_path_factory.mktemp("replies"))
    words = {REPLIES.get(token, letter): token for token, letter in enumerate(ALPHABET)}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    sizes = ("--max-running-requests", "2", "--max-total-tokens", "1000", "--context-length", "200")
    return ("--device", srv_device, "--model-path", str(folder), "--load-format", "dummy", *sizes)


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(tmp_path_factory.mktemp("plain") / "log", *common) as server:
        yield server


@pytest.fixture(scope="module")
def other(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    formats = ("--tool-call-parser", "llama3_json", "--reasoning-parser", "none")
    with launched(tmp_path_factory.mktemp("other") / "log", *common, *formats) as server:
        yield server


def reply(server: Server, token: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 1, "temperature": 0}
    response = server.post("/v1/chat/completions", **body, logit_bias={str(token): 100})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


@covers("tool_call_parser=llama3")
def test_tool_call_parser(plain: Server, other: Server) -> None:
    """The same reply is a call in the format of the server, and text in others."""
    for server, call, text in ((plain, MARKED, PLAIN), (other, PLAIN, MARKED)):
        (called,) = reply(server, call)["tool_calls"]
        assert called["function"] == {"name": "now", "arguments": "{}"}
        assert reply(server, text)["content"].strip() == REPLIES[text]
    chosen = "tool format qwen: chosen because the chat template contains <tool_call> and arguments"
    assert chosen in plain.log_text()
    assert "tool format llama3: set by --tool-call-parser" in other.log_text()


@covers("reasoning_parser=none")
def test_reasoning_parser(plain: Server, other: Server) -> None:
    message = reply(plain, THOUGHT)
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    left = reply(other, THOUGHT)
    assert left.pop("content").strip() == REPLIES[THOUGHT]
    assert left == {"role": "assistant", "refusal": None}
    assert "reasoning format qwen3: chosen because" in plain.log_text()
    assert "reasoning format" not in other.log_text()
