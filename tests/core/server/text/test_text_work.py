"""How much of the text of one request is processed on the event loop, and what is refused before any is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from server_support import eventually, serving

from srv.errors import RequestError
from srv.grammar.source import GrammarSource
from srv.io.bounded_process import BoundedProcess, Lost
from srv.server.request.grammars import Grammars
from srv.server.settings import GrammarSettings
from srv.server.text.gathering import Gathering
from srv.server.text.work import INLINE_COST, split
from srv.testing.fake_engine import ByteTokenizer, FakeEngine
from srv.types import Vocabulary

pytestmark = pytest.mark.anyio
TEXT = "a" * 4090
LONG = {"context_length": 8192, "max_request_tokens": 8192}


class Recorder(ByteTokenizer):
    """Records how many characters and tokens are processed on the thread of the event loop, and how many in all."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = threading.get_ident()
        self.inline = self.total = 0

    def start_over(self) -> None:
        """Forget what was encoded while the server was made."""
        self.inline = self.total = 0

    def _record(self, size: int) -> None:
        self.total += size
        if threading.get_ident() == self._loop:
            self.inline += size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._record(len(text))
        return super().encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self._record(len(ids))
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [TEXT] * 64, "max_tokens": 1}),
        ("/generate", {"text": [TEXT] * 64, "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/embeddings", {"input": [TEXT] * 64}),
        ("/tokenize", {"prompt": [TEXT] * 64}),
        ("/detokenize", {"tokens": [[97] * 4090] * 24}),
    ],
)
async def test_many_texts_of_one_request_leave_the_event_loop_free(path: str, body: dict[str, Any]) -> None:
    text = Recorder()
    async with serving(text=text, **LONG) as server:
        text.start_over()
        response = await server.post(path, **body)
        assert response.status_code == 200, response.text
    assert text.total >= 24 * 4090
    assert text.inline <= INLINE_COST


async def test_a_few_short_texts_need_no_thread() -> None:
    text = Recorder()
    async with serving(text=text, **LONG) as server:
        text.start_over()
        assert (await server.post("/tokenize", prompt=["a" * 100] * 3)).status_code == 200
    assert text.inline == text.total == 300


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": [TEXT] * 1023 + ["a" * 200_000]}, "context_length_exceeded"),
        ({"stop": ["x"] * 17}, "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "invalid_token_id"),
        ({"stop_token_ids": [99999]}, "invalid_token_id"),
        ({"n": 2}, "too_many_sequences"),
    ],
)
async def test_what_can_be_refused_without_tokenizing_is(changes: dict[str, Any], code: str) -> None:
    text = Recorder()
    async with serving(text=text, max_prompt_bytes=100_000, **LONG) as server:
        text.start_over()
        response = await server.post("/v1/completions", **{"prompt": [TEXT] * 1024, "max_tokens": 1} | changes)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert text.total == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"stop": ["x"] * 17}, "invalid_value"), ({"logit_bias": {"99999": 1}}, "invalid_token_id")],
)
async def test_a_chat_is_refused_before_it_is_tokenized(changes: dict[str, Any], code: str) -> None:
    text = Recorder()
    async with serving(text=text, **LONG) as server:
        text.start_over()
        messages = [{"role": "user", "content": TEXT * 10}]
        response = await server.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 1} | changes)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert text.total == 0


async def test_a_prompt_that_is_too_long_ends_the_tokenizing_of_those_after_it() -> None:
    text = Recorder()
    async with serving(FakeEngine(), text=text, context_length=4000, max_request_tokens=4000) as server:
        response = await server.post("/v1/completions", prompt=[TEXT] * 1024, max_tokens=1)
        assert response.json()["error"]["param"] == "prompt[0]"
    assert text.total <= 4 * 4090


class Endless(Recorder):
    """A chat template that ends with its process only."""

    def __init__(self) -> None:
        super().__init__()
        self.rendering, self.closed = threading.Event(), threading.Event()

    def apply_chat_template(self, *args: object, **kwargs: object) -> str:
        self.rendering.set()
        self.closed.wait(60)
        raise RequestError("the process that renders it ended", code="chat_template_error", param="messages")

    def close(self) -> None:
        self.closed.set()


async def test_a_shutdown_ends_text_work_with_the_status_of_a_shutdown() -> None:
    """The rendering that runs, those that wait for it, and text that arrives later."""
    text = Endless()
    messages = [{"role": "user", "content": "a"}]
    async with serving(text=text, **LONG) as server:
        text.start_over()
        chats = [asyncio.create_task(server.post("/v1/chat/completions", messages=messages)) for _ in range(3)]
        await eventually(text.rendering.is_set)
        server.app.state.service.preprocessor.close()
        later = await server.post("/v1/completions", prompt=[TEXT] * 64, max_tokens=1)
        for response in (*await asyncio.gather(*chats), later):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            assert int(response.headers["retry-after"]) > 0


def test_parts_have_a_bounded_size() -> None:
    assert split([]) == []
    assert split([10, 10, 10], limit=150) == [range(0, 2), range(2, 3)]
    assert split([1000, 1, 1], limit=150) == [range(0, 1), range(1, 3)]


async def test_a_text_that_cannot_be_encoded_fails_alone_among_those_gathered() -> None:
    calls: list[int] = []

    async def encode(texts: Sequence[str], special: bool) -> list[list[int]]:
        calls.append(len(texts))
        if "bad" in texts:
            raise RequestError("no", code="invalid_text")
        return [[len(text), special] for text in texts]

    gathering = Gathering(encode, 4, 60)
    texts = ["a", "bad", "ccc", "dd"]
    results = await asyncio.gather(*(gathering.encode(text, text == "a") for text in texts), return_exceptions=True)
    assert [results[0], results[2], results[3]] == [[1, True], [3, False], [2, False]]
    assert isinstance(results[1], RequestError)
    assert calls == [1, 3, 1, 1, 1]


async def test_no_text_waits_for_ever_if_encoding_fails() -> None:
    """Together the texts are refused; alone, one of them ends the tokenizer."""

    async def encode(texts: Sequence[str], special: bool) -> list[list[int]]:
        if len(texts) > 1:
            raise RequestError("no", code="invalid_text")
        if texts == ["bad"]:
            raise OSError("the tokenizer ended")
        return [[len(text)] for text in texts]

    gathering = Gathering(encode, 3, 60)
    calls = (gathering.encode(text, special=True) for text in ("bad", "a", "bb"))
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert isinstance(results[0], OSError)
    assert results[1:] == [[1], [2]]


class Vocabulated(ByteTokenizer):
    """Its vocabulary cannot be read at first."""

    failures = 1

    def vocabulary(self) -> Vocabulary:
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is away")
        return Vocabulary(bytes(range(256)), [1] * 256, [])


def starved(process: BoundedProcess, question: bytes) -> bytes:
    raise Lost("the machine is busy", retry=True)


async def test_what_a_machine_fails_at_is_tried_again_and_a_shutdown_is_no_fault_of_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vocabulary, then the start of the process that checks grammars."""
    sent: list[Vocabulary] = []
    grammars = Grammars(GrammarSettings("llguidance", "", 260, (257,)), Vocabulated(), sent.append)
    source = GrammarSource(kind="regex", text="a+", param="regex")
    with pytest.raises(OSError, match="the disk is away"):
        await grammars.check(source)
    assert not sent
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/absent/python")
        with pytest.raises(RequestError, match="no process for it could be started") as caught:
            await grammars.check(source)
    assert (caught.value.code, caught.value.status) == ("grammars_busy", 503)
    assert "change it" not in caught.value.message
    with monkeypatch.context() as patch:
        patch.setattr(BoundedProcess, "ask", starved)
        with pytest.raises(RequestError, match="the machine is busy") as caught:
            await grammars.check(source)
    assert (caught.value.code, caught.value.status) == ("grammars_busy", 503)
    assert (await grammars.check(source)).grammar.text
    with pytest.raises(RequestError, match="change it"):
        await grammars.check(GrammarSource(kind="regex", text="(a", param="regex"))
    assert len(sent) == 1
    running = asyncio.create_task(grammars.check(GrammarSource(kind="regex", text="b+", param="regex")))
    await asyncio.sleep(0)
    grammars.close()
    for check in (running, grammars.check(GrammarSource(kind="regex", text="c+", param="regex"))):
        with pytest.raises(RequestError) as caught:
            await check
        assert (caught.value.code, caught.value.status) == ("shutting_down", 503)
