"""The real `openai` client with a real server: what its users rely on, streamed and not streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from e2e_support import REQUEST_S, Server

from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.e2e

SERVER_ARGUMENTS = ("--max-running-requests", "16", "--max-total-tokens", "16384")
# In float32 the shape of a batch does not change tokens; some tests compare outputs of different batches. Not every
# device has float32; tests that are evidence for any device do not compare different batches.
PROCESSOR_ARGUMENTS = ("--dtype", "float32")
STORY = "Once upon a time"
ASK: list[Any] = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", timeout=REQUEST_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


@covers("endpoint:GET /v1/models", "endpoint:GET /v1/models/{model:path}")
def test_models_can_be_listed_and_retrieved(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


@covers("endpoint:POST /v1/chat/completions")
def test_chat_streamed_says_what_chat_whole_says(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=ASK,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_chat_ends_by_itself(client: openai.OpenAI, model: str) -> None:
    hello: list[Any] = [{"role": "user", "content": "Say only: yes"}]
    answer = client.chat.completions.create(model=model, messages=hello, max_completion_tokens=200, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 200
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_no_usage_in_a_stream_unless_asked_for(client: openai.OpenAI, model: str) -> None:
    chunks = list(client.completions.create(model=model, prompt=STORY, max_tokens=3, temperature=0, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@covers(
    "endpoint:POST /v1/responses",
    "endpoint:POST /v1/responses/input_tokens",
    "endpoint:GET /v1/responses/{response}",
    "endpoint:DELETE /v1/responses/{response}",
    "endpoint:GET /v1/responses/{response}/input_items",
    "endpoint:POST /v1/responses/{response}/cancel",
)
def test_a_response_streamed_says_what_it_says_whole_and_can_be_continued(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Name three colours.", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        *events, last = stream
    kinds = [event.type for event in (*events, last)]
    assert last.type == "response.incomplete"
    streamed = last.response
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert whole.output_text == streamed.output_text
    assert whole.output_text
    assert whole.usage is not None
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 12)
    counted = client.responses.input_tokens.count(model=model, input=asked["input"])
    assert counted.input_tokens == whole.usage.input_tokens
    follow = client.responses.create(
        model=model, input="Another.", previous_response_id=whole.id, temperature=0, max_output_tokens=4
    )
    assert follow.usage is not None
    assert follow.usage.input_tokens > whole.usage.input_tokens + 12
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    texts = [item.content[0].text for item in client.responses.input_items.list(whole.id) if item.type == "message"]
    assert texts == ["Name three colours."]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


@covers("endpoint:POST /v1/completions")
def test_completion_streamed_says_what_completion_whole_says(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=STORY, max_tokens=24, temperature=0)
    stream = client.completions.create(
        model=model, prompt=STORY, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = stream
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"


def test_text_is_the_same_however_the_characters_fall_on_tokens(client: openai.OpenAI, model: str) -> None:
    """The bytes of a character may be in several tokens: no chunk may have an incomplete character."""
    wanted: list[Any] = [{"role": "user", "content": "Repeat exactly: 日本語 🙂 naïve"}]
    whole = client.chat.completions.create(model=model, messages=wanted, max_tokens=32, temperature=0)
    stream = client.chat.completions.create(model=model, messages=wanted, max_tokens=32, temperature=0, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == whole.choices[0].message.content
    text = "".join(parts)
    assert any(ord(character) > 127 for character in text)
    assert "�" not in text.removesuffix("�")


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert entry.logprob <= 0
        ranked = [top.logprob for top in entry.top_logprobs]
        assert len(ranked) == 3
        assert ranked == sorted(ranked, reverse=True)
        assert entry.token == entry.top_logprobs[0].token  # greedy chooses the most likely token
        assert entry.logprob == entry.top_logprobs[0].logprob
    spelt = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode()
    assert spelt == answer.choices[0].message.content


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    entries = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == [entry.token for entry in expected]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)


def test_completion_logprobs_and_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=STORY, max_tokens=4, temperature=0, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text.startswith(STORY)
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens or [])
    assert all(value <= 0 for value in logprobs.token_logprobs[-4:])


def test_stop_string_across_token_borders_cuts_text_logprobs_and_usage(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 24, "temperature": 0, "logprobs": 0}
    free = client.completions.create(**asked).choices[0]
    assert free.logprobs is not None
    tokens, offsets = free.logprobs.tokens or [], free.logprobs.text_offset or []
    border = next(at for at in range(8, 20) if len(tokens[at]) >= 3 and len(tokens[at + 1]) >= 3)
    stop = tokens[border][-2:] + tokens[border + 1][:2]
    cut = free.text.index(stop)
    for stream in (False, True):
        choice, used = _stopped(client, asked, stop, stream)
        assert choice["text"] == free.text[:cut]
        assert choice["finish_reason"] == "stop"
        assert choice["matched_stop"] == stop
        assert used == sum(offset < cut for offset in offsets)
        assert choice["tokens"] == tokens[:used]


def _stopped(client: openai.OpenAI, asked: dict[str, Any], stop: str, stream: bool) -> tuple[dict[str, Any], int]:
    """The text, reason and tokens of a stopped completion, and the completion tokens of its usage."""
    if not stream:
        whole = client.completions.create(**asked, stop=[stop])
        assert whole.usage is not None
        answers, usage = [whole], whole.usage
    else:
        *answers, last = client.completions.create(
            **asked, stop=[stop], stream=True, stream_options={"include_usage": True}
        )
        assert last.usage is not None
        usage = last.usage
    choices = [answer.choices[0] for answer in answers]
    ended = choices[-1]
    return {
        "text": "".join(choice.text for choice in choices),
        "finish_reason": ended.finish_reason,
        "matched_stop": (ended.model_extra or {}).get("matched_stop"),
        "tokens": [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []],
    }, usage.completion_tokens


def test_a_stop_string_that_never_comes_holds_nothing_back(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=STORY, max_tokens=12, temperature=0)
    beginning = free.choices[0].text[-3:] + "§"  # the text ends with a prefix of it
    held = client.completions.create(model=model, prompt=STORY, max_tokens=12, temperature=0, stop=beginning)
    assert held.choices[0].text == free.choices[0].text
    assert held.choices[0].finish_reason == "length"


def test_n_gives_different_outputs_the_first_being_that_of_the_seed(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 10, "temperature": 1.0, "seed": 7}
    one = client.completions.create(**asked)
    three = client.completions.create(**asked, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert texts[0] == one.choices[0].text
    assert three.usage is not None
    assert one.usage is not None
    assert three.usage.completion_tokens == 30
    assert three.usage.prompt_tokens == one.usage.prompt_tokens  # one prompt, however many outputs


def test_n_in_a_stream_keeps_the_outputs_apart(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, ended = {0: "", 1: ""}, {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            ended[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ended.keys() == {0, 1}


def test_several_prompts_in_one_completion(client: openai.OpenAI, model: str) -> None:
    pair = [STORY, "The capital of France is"]
    alone = [client.completions.create(model=model, prompt=one, max_tokens=6, temperature=0) for one in pair]
    together = client.completions.create(model=model, prompt=pair, max_tokens=6, temperature=0)
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]


def test_seed_repeats_and_another_seed_differs(client: openai.OpenAI, model: str) -> None:
    def text(seed: int | None) -> str:
        answer = client.completions.create(model=model, prompt=STORY, max_tokens=12, temperature=1.2, seed=seed)
        return answer.choices[0].text

    assert text(11) == text(11)
    assert text(11) != text(12)
    assert text(None) != text(None)


def test_temperature_zero_repeats(client: openai.OpenAI, model: str) -> None:
    answers = {
        client.completions.create(model=model, prompt=STORY, max_tokens=8, temperature=0).choices[0].text
        for _ in range(3)
    }
    assert len(answers) == 1


def test_logit_bias_forces_and_forbids(client: openai.OpenAI, model: str, server: Server) -> None:
    (forced,) = server.post("/tokenize", prompt=" banana").json()["tokens"]
    asked: dict[str, Any] = {"model": model, "prompt": STORY, "temperature": 0, "max_tokens": 3}
    answer = client.completions.create(**asked, logit_bias={str(forced): 100})
    assert answer.choices[0].text == " banana" * 3
    first = server.generate(text=STORY, sampling_params={"temperature": 0, "max_new_tokens": 1})["output_ids"][0]
    free = client.completions.create(**asked)
    other = client.completions.create(**asked, logit_bias={str(first): -100})
    assert other.choices[0].text[:1] != free.choices[0].text[:1]


def test_extensions_pass_through_extra_body(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=STORY,
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "repetition_penalty": 1.3, "top_k": 5, "min_p": 0.01, "min_tokens": 5},
    )
    plain = client.completions.create(model=model, prompt=STORY, max_tokens=40, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.choices[0].text != plain.choices[0].text  # the penalty has an effect


def test_a_repeated_prompt_is_found_in_the_prefix_cache(client: openai.OpenAI, model: str, server: Server) -> None:
    server.flush()
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    counts = []
    for _ in range(2):
        usage = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == 0
    assert (counts[1] or 0) >= 48


def test_errors_are_what_the_client_knows(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt=STORY, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt=STORY)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="word " * 8200)
    assert long.value.code == "context_length_exceeded"
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=ASK, tools=tools)
    assert refused.value.param == "tools"
    assert "--tool-call-parser" in str(refused.value)


def test_closing_a_stream_frees_the_request(client: openai.OpenAI, model: str, server: Server) -> None:
    before = server.metrics()["srv_sequences_aborted_total"]
    stream = client.completions.create(
        model=model, prompt=STORY, max_tokens=2000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    after = server.wait_pages_back()
    assert after["srv_sequences_aborted_total"] == before + 1
