"""`/v1/completions` and `/v1/chat/completions` over the fake engine: formats, usage, logprobs, stop, n."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from every import every
from server_support import MODEL, generating, serving

from srv.io.messages import Finish
from srv.server.request.seeds import seeds_for
from srv.testing.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine
from srv.types import RequestSpec

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]


def generated(engine: FakeEngine) -> list[RequestSpec]:
    return [message for message in engine.received if isinstance(message, RequestSpec)]


async def test_completion_has_openai_format_and_default_length() -> None:
    async with serving(cached_engine := FakeEngine(cached_tokens=2)) as server:
        response = await server.post("/v1/completions", model=MODEL, prompt="abc")
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "text_completion"
        assert body["model"] == MODEL
        assert body["id"].startswith("cmpl-")
        assert body["choices"] == [
            {"index": 0, "text": "The quick brown ", "logprobs": None, "finish_reason": "length", "matched_stop": None}
        ]
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 16,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert generated(cached_engine)[0].tokens == (97, 98, 99)


async def test_chat_renders_the_template_and_ends_at_the_end_token() -> None:
    async with serving(generating("Hello!", EOS, *b"never")) as server:
        response = await server.post("/v1/chat/completions", model=MODEL, messages=HELLO)
        choice = response.json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert choice["matched_stop"] == EOS
        assert response.json()["usage"]["completion_tokens"] == 7  # including the end token
        sent = generated(server.engine)[0]
        assert bytes(sent.tokens) == b"user: hi\nassistant: "
        assert sent.params.max_tokens == 256 - len(sent.tokens)  # as many as fit


async def test_special_tokens_are_added_to_texts_but_not_to_rendered_chats() -> None:
    """A rendered chat template contains them already."""
    async with serving(generating("x"), ByteTokenizer(adds_bos=True)) as server:
        await server.post("/v1/completions", prompt="a")
        await server.post("/v1/completions", prompt="a", add_special_tokens=False)
        await server.post("/v1/chat/completions", messages=HELLO)
        assert [sent.tokens.count(BOS) for sent in generated(server.engine)] == [1, 0, 0]


async def test_chat_takes_text_parts_developer_role_and_template_variables() -> None:
    async with serving(generating("x")) as server:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        extra = {"chat_template_kwargs": {"preamble": "P"}, "add_generation_prompt": False}
        response = await server.post("/v1/chat/completions", messages=messages, **extra)
        assert response.status_code == 200
        assert bytes(generated(server.engine)[0].tokens) == b"system: be brief\nuser: ab\nP"


async def test_chat_stream_starts_with_role_and_ends_with_reason_usage_and_done() -> None:
    async with serving(generating("Hey", EOS)) as server:
        events = await server.stream("/v1/chat/completions", messages=HELLO, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        *chunks, usage = events[:-1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks] == ["", "H", "e", "y", ""]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4


async def test_completion_stream_without_usage() -> None:
    async with serving() as server:
        events = await server.stream("/v1/completions", prompt="a", max_tokens=3)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "The"
        assert all("usage" not in event for event in events[:-1])
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]


async def test_incomplete_characters_are_held_back() -> None:
    async with serving(generating("é€😀", EOS)) as server:
        events = await server.stream("/v1/completions", prompt="a", max_tokens=20)
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        assert [text for text in texts if text] == ["é", "€", "😀"]


@every("stream", [False, True])
@every("tokens_per_step", [1, 3, 100])
async def test_stop_string_truncates_text_usage_and_logprobs_and_finishes_the_request(
    stream: bool, tokens_per_step: int
) -> None:
    engine = FakeEngine(script=lambda message: b"one STOP two" * 20, tokens_per_step=tokens_per_step)
    async with serving(engine) as server:
        body = {"prompt": "a", "max_tokens": 200, "stop": ["zzz", " STOP"], "logprobs": 0}
        if stream:
            events = await server.stream("/v1/completions", **body, stream_options={"include_usage": True})
            usage = events[-2]["usage"]
            choices = [event["choices"][0] for event in events[:-2]]
        else:
            answer = (await server.post("/v1/completions", **body)).json()
            usage, choices = answer["usage"], answer["choices"]
        assert "".join(choice["text"] for choice in choices) == "one"
        assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["o", "n", "e"]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["matched_stop"] == " STOP"
        assert usage["completion_tokens"] == 3
        finishes = [message for message in engine.received if isinstance(message, Finish)]
        assert [message.request for message in finishes] == [generated(engine)[0].id]
        assert not engine.running


async def test_stop_string_can_be_kept_in_the_text() -> None:
    async with serving(generating("one STOP two")) as server:
        body = {"prompt": "a", "max_tokens": 50, "stop": "STOP", "include_stop_str_in_output": True}
        answer = (await server.post("/v1/completions", **body)).json()
        assert answer["choices"][0]["text"] == "one STOP"


async def test_stop_token_ids_end_the_output_without_their_text() -> None:
    async with serving(generating("one\ntwo")) as server:
        answer = (await server.post("/v1/completions", prompt="a", max_tokens=50, stop_token_ids=[10])).json()
        assert answer["choices"][0]["text"] == "one"
        assert answer["choices"][0]["matched_stop"] == 10
        assert answer["usage"]["completion_tokens"] == 4


async def test_a_partial_stop_string_is_released_when_it_does_not_match() -> None:
    async with serving(generating("a STO b")) as server:
        answer = (await server.post("/v1/completions", prompt="a", max_tokens=7, stop="STOP")).json()
        assert answer["choices"][0]["text"] == "a STO b"
        assert answer["usage"]["completion_tokens"] == 7


async def test_random_seed_determines_the_seeds_of_requests_without_one() -> None:
    drawn: list[list[int]] = []
    for random_seed in (5, 5, 6, None, None):
        async with serving(random_seed=random_seed) as server:
            for _ in range(2):
                await server.post("/v1/completions", prompt="a", max_tokens=1)
            drawn.append([message.params.seed for message in generated(server.engine)])
    same, again, other, unseeded, another = drawn
    assert same == again
    assert len({*same, *other, *unseeded, *another}) == 8


async def test_n_sequences_have_derived_seeds_and_one_prompt_in_usage() -> None:
    def by_seed(message: RequestSpec) -> Sequence[int]:
        return b"%d" % (message.params.seed % 10)

    async with serving(FakeEngine(script=by_seed)) as server:
        answer = (await server.post("/v1/completions", prompt="abcd", n=3, seed=7, max_tokens=1)).json()
        seeds = [message.params.seed for message in generated(server.engine)]
        assert seeds == list(seeds_for(7, 3))
        assert seeds[0] == 7
        assert len(set(seeds)) == 3
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in answer["choices"]] == [str(seed % 10) for seed in seeds]
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 3


async def test_sequences_name_their_request_and_the_key_that_sent_it() -> None:
    """The scheduler shares its slots among requests, and among keys."""
    async with serving() as server:
        body = {"prompt": "a", "max_tokens": 1}
        await server.post("/v1/completions", prompt="a", n=2, max_tokens=1)
        await server.post("/v1/completions", prompt="a", max_tokens=1)
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await server.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        groups = [spec.group for spec in generated(server.engine)]
        owners = [spec.owner for spec in generated(server.engine)]
        assert groups[0] == groups[1]
        assert len(set(groups[1:])) == 5
        assert owners[:3] == [""] * 3
        assert owners[3] == owners[5]
        assert len({*owners[2:5]}) == 3
        assert "one" not in owners[3]


async def test_requests_without_a_seed_get_different_ones() -> None:
    async with serving() as server:
        for _ in range(2):
            await server.post("/v1/completions", prompt="a", n=2, max_tokens=1)
        seeds = {message.params.seed for message in generated(server.engine)}
        assert len(seeds) == 4
        assert all(0 <= seed < 2**63 for seed in seeds)


async def test_streamed_chat_with_n_finishes_every_index() -> None:
    async with serving() as server:
        events = await server.stream("/v1/chat/completions", messages=HELLO, n=3, max_tokens=5)
        texts, reasons = ["", "", ""], {}
        for event in events[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        assert texts == ["The q"] * 3
        assert reasons == {0: "length", 1: "length", 2: "length"}


@every(
    ("prompt", "sent"),
    [
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_prompts_as_batch_and_as_token_ids(prompt: object, sent: list[bytes]) -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", prompt=prompt, max_tokens=1, n=2)).json()
        assert [bytes(message.tokens) for message in generated(server.engine)] == [one for one in sent for _ in "12"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(sent)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_chat_logprobs() -> None:
    async with serving(generating("é!", EOS)) as server:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        none = await server.post("/v1/chat/completions", messages=HELLO, top_logprobs=0)
        assert none.json()["choices"][0]["logprobs"] is None, "it asks for nothing"
        answer = (await server.post("/v1/chat/completions", **body)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content[:3]] == [[0xC3], [0xA9], [0x21]]
        assert len(content) == answer["usage"]["completion_tokens"] == 4
        assert content[2]["token"] == "!"
        assert content[2]["logprob"] == pytest.approx(-0.033)
        assert [other["token"] for other in content[2]["top_logprobs"]] == ["!", '"']
        assert content[3]["logprob"] == -9999.0  # JSON has no minus infinity


async def test_logprobs_of_given_tokens() -> None:
    """Among the top ones of each position, in whole and streamed responses, also of the prompt that is echoed."""
    listed = {"logprob_token_ids": [7, 33, 5], "max_tokens": 2}
    async with serving(generating("é!")) as server:
        body = {"messages": HELLO, "logprobs": True, "return_tokens_as_token_ids": True, **listed}
        whole = (await server.post("/v1/chat/completions", **body)).json()["choices"][0]["logprobs"]["content"]
        *chunks, _ = await server.stream("/v1/chat/completions", **body)
        streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        assert [entry for chunk in streamed for entry in chunk["content"]] == whole
        for entry in whole:
            top = {alternative["token"]: alternative["logprob"] for alternative in entry["top_logprobs"]}
            assert top == pytest.approx({"token_id:7": -0.007, "token_id:33": -0.033, "token_id:5": -0.005})
        answer = (await server.post("/v1/completions", prompt="ab", logprobs=0, echo=True, **listed)).json()
        first, *others = answer["choices"][0]["logprobs"]["top_logprobs"]
        assert first is None
        assert len(others) == 3
        for one in others:
            assert {"\x07", "!", "\x05"} < set(one)
            assert one["\x07"] == pytest.approx(-0.007)
        for path, prompt in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
            for fields, part in (
                (listed, "it needs logprobs"),
                ({"logprobs": 1, "logprob_token_ids": [10**6]}, "the vocabulary is 0 to"),
                ({"logprobs": 1, "logprob_token_ids": [*range(129)]}, "at most 128"),
            ):
                asked = {**fields, "logprobs": True} if "messages" in prompt and "logprobs" in fields else fields
                error = (await server.post(path, **prompt, **asked)).json()["error"]
                assert error["param"] == "logprob_token_ids"
                assert part in error["message"]


async def test_a_request_may_name_the_grammar_backend_of_the_server() -> None:
    """vLLM's former field. The server of this test has none."""
    async with serving() as server:
        for path, prompt in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
            for name in (None, "", "auto", "none"):
                assert (
                    await server.post(path, **prompt, max_tokens=1, guided_decoding_backend=name)
                ).status_code == 200
            refused = await server.post(path, **prompt, max_tokens=1, guided_decoding_backend="guidance")
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == (
                "guided_decoding_backend = guidance is refused: the grammar backend of this server is none; remove the"
                " field, or start the server with another --grammar-backend"
            )


async def test_tokens_of_logprobs_as_ids() -> None:
    """Two tokens that are no characters alone have the same text."""
    async with serving(generating("é!")) as server:
        asked = {"max_tokens": 3, "return_tokens_as_token_ids": True}
        chat = (await server.post("/v1/chat/completions", messages=HELLO, logprobs=True, **asked)).json()
        content = chat["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["token_id:195", "token_id:169", "token_id:33"]
        answer = (await server.post("/v1/completions", prompt="a", logprobs=1, **asked)).json()["choices"][0][
            "logprobs"
        ]
        assert answer["tokens"] == ["token_id:195", "token_id:169", "token_id:33"]
        assert answer["text_offset"] == [0, 0, 1]
        assert list(answer["top_logprobs"][2]) == ["token_id:33"]


@every("name", ["rid", "request_id"])
async def test_the_client_names_the_request(name: str) -> None:
    async with serving() as server:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
            answer = await server.post(path, **body, max_tokens=1, **{name: "mine"})
            assert answer.json()["id"] == "mine"
        both = await server.post("/v1/completions", prompt="a", rid="a", request_id="b")
        assert (both.status_code, both.json()["error"]["param"]) == (400, "request_id")


async def test_streamed_chat_logprobs_are_sent_with_their_text() -> None:
    async with serving(generating("ab", EOS)) as server:
        events = await server.stream("/v1/chat/completions", messages=HELLO, logprobs=True)
        pairs = [
            (choice["delta"].get("content"), [entry["token"] for entry in choice["logprobs"]["content"]])
            for event in events[:-1]
            if (choice := event["choices"][0])["logprobs"]
        ]
        assert pairs == [("a", ["a"]), ("b", ["b"]), ("", ["<257>"])]


async def test_completion_logprobs_with_offsets() -> None:
    async with serving(generating("é!")) as server:
        answer = (await server.post("/v1/completions", prompt="a", max_tokens=3, logprobs=1)).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs["text_offset"] == [0, 0, 1]
        assert logprobs["token_logprobs"] == pytest.approx([-0.195, -0.169, -0.033])
        assert logprobs["top_logprobs"][2] == {"!": pytest.approx(-0.033)}


@every("stream", [False, True])
async def test_echo_returns_prompt_and_its_logprobs_first(stream: bool) -> None:
    async with serving(generating("cd")) as server:
        body = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 0}
        if stream:
            choices = [event["choices"][0] for event in (await server.stream("/v1/completions", **body))[:-1]]
        else:
            choices = (await server.post("/v1/completions", **body)).json()["choices"]
        assert "".join(choice["text"] for choice in choices) == "abcd"
        merged = {key: [v for choice in choices for v in choice["logprobs"][key]] for key in choices[0]["logprobs"]}
        assert merged["tokens"] == ["a", "b", "c", "d"]
        assert merged["token_logprobs"][0] is None
        assert merged["token_logprobs"][1:] == pytest.approx([-0.098, -0.099, -0.1])
        assert merged["text_offset"] == [0, 1, 2, 3]
        assert generated(server.engine)[0].params.prompt_logprobs == 0


async def test_scoring_a_prompt_generates_no_tokens() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", prompt="ab", max_tokens=0, echo=True, logprobs=0)).json()
        assert answer["choices"][0]["text"] == "ab"
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_extension() -> None:
    async with serving() as server:
        answer = (await server.post("/v1/completions", prompt="ab", max_tokens=1, prompt_logprobs=1)).json()
        first, second = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second == {"98": {"logprob": pytest.approx(-0.098), "rank": 1, "decoded_token": "b"}}


async def test_a_top_k_beyond_any_vocabulary_keeps_all_tokens() -> None:
    async with serving() as server:
        for value in (2**31, 10**18):
            assert (await server.post("/v1/completions", prompt="a", top_k=value)).status_code == 200
        assert [spec.params.top_k for spec in generated(server.engine)] == [-1, -1]


async def test_every_sampling_field_reaches_the_engine() -> None:
    async with serving() as server:
        response = await server.post(
            "/v1/completions",
            prompt="a",
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=-0.4,
            logit_bias={"65": -100, "66": 5.5},
            seed=11,
            stop_token_ids=[65, 66],
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2,
        )
        assert response.status_code == 200
        params = generated(server.engine)[0].params
        assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k) == (9, 2, 0.5, 5)
        assert (params.top_p, params.min_p, params.repetition_penalty) == (0.9, 0.1, 1.2)
        assert (params.frequency_penalty, params.presence_penalty) == (0.3, -0.4)
        assert params.logit_bias == ((65, -100.0), (66, 5.5))
        assert (params.seed, params.stop_token_ids, params.ignore_eos) == (11, (65, 66), True)
        assert (params.logprobs, params.prompt_logprobs) == (3, 2)


async def test_skip_special_tokens_omits_their_text() -> None:
    for skip, shown in ((True, "ab"), (False, "a<258>b")):
        async with serving(FakeEngine(script=lambda message: [97, 258, 98])) as server:
            answer = (await server.post("/v1/completions", prompt="x", skip_special_tokens=skip)).json()
            assert answer["choices"][0]["text"] == shown


async def test_tiny_temperature_is_greedy() -> None:
    async with serving() as server:
        await server.post("/v1/completions", prompt="x", temperature=1e-9)
        assert generated(server.engine)[0].params.temperature == 0
