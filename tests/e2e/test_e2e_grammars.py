"""Structured output on a real server with a model of noise: valid answers, and hostile grammars that harm nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from bytes_model import CONTEXT, write_model
from e2e_support import Server, read_events, served
from every import every

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "hi"}]
DENSE = "--constrained-json-disable-any-whitespace"  # noise would spend its tokens on white space
INVALID = 'srv_structured_outputs_total{valid="false"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("model") / "bytes")
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with served(
        log, "--device", "cpu", "--model-path", str(folder), "--load-format", "dummy", "--dtype", "float32", DENSE
    ) as running:
        yield running


def choices(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, max_tokens=200, **body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def chat(server: Server, **body: Any) -> list[str]:
    """The contents of a chat request, which must have ended by themselves and be valid."""
    answers = choices(server, "/v1/chat/completions", messages=HELLO, **body)
    assert all(answer["finish_reason"] == "stop" and "structured_output_valid" not in answer for answer in answers), (
        answers
    )
    return [answer["message"]["content"] for answer in answers]


def test_clients_get_json_that_follows_their_schema(server: Server) -> None:
    """OpenAI's client, with and without a stream and with n; vLLM's and SGLang's forms in both endpoints."""
    client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none")
    completion = client.chat.completions.create(
        model=server.model(), messages=HELLO, response_format=FORMAT, n=4, seed=1, max_tokens=200
    )
    assert len({choice.message.content for choice in completion.choices}) > 1
    for choice in completion.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    stream = client.chat.completions.create(
        model=server.model(), messages=HELLO, response_format=FORMAT, stream=True, max_tokens=200
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(parts) > 5
    jsonschema.validate(json.loads("".join(parts)), SCHEMA)
    for field in (
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        (choice,) = choices(server, "/v1/completions", prompt="x", **field)
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_a_schema_that_is_not_strict_names_what_is_not_enforced(server: Server) -> None:
    """`uniqueItems` of numbers has no grammar; `not` of listed values has."""
    properties = {
        "tags": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "uniqueItems": True,
            "maxItems": 3,
        },
        "kind": {"enum": ["a", "b"], "not": {"const": "a"}},
    }
    schema = {"type": "object", "properties": properties, "required": ["tags", "kind"], "additionalProperties": False}
    body = {"messages": HELLO, "max_tokens": 200}
    for stream in (False, True):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = server.post("/v1/chat/completions", **body, response_format=form, stream=stream)
        assert (answer.status_code, answer.headers.get("x-srv-not-enforced")) == (200, '["uniqueItems"]'), answer.text
        if not stream:
            assert json.loads(answer.json()["choices"][0]["message"]["content"])["kind"] == "b"
    form["json_schema"]["strict"] = True  # type: ignore[index]
    refused = server.post("/v1/chat/completions", **body, response_format=form)
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]


@every(
    ("field", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
        ({"regex": "(ab|é)+!"}, "(ab|é)+!"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "<" [a-f] ">"'}, "<[a-f]>"),
        ({"ebnf": 'root ::= item item\nitem ::= "x" | "yy"'}, "(x|yy){2}"),
        ({"guided_grammar": "start: /[a-f]{4}/"}, "[a-f]{4}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"regex": "q+w"}}, "q+w"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<n>",
                        "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}},
                        "end": "</n>",
                    },
                }
            },
            "<n>(1|22)</n>",
        ),
    ],
)
def test_each_form_of_a_grammar_is_followed(server: Server, field: dict[str, Any], pattern: str) -> None:
    (text,) = chat(server, **field)
    assert re.fullmatch(pattern, text)


def test_the_native_endpoint_takes_one_grammar_per_prompt(server: Server) -> None:
    params = [{"regex": "[ab]{4}"}, {"json_schema": '{"enum": [7, 8]}'}, {"ebnf": 'root ::= "z" [xy]'}]
    body = [{**param, "max_new_tokens": 30, "temperature": 0} for param in params]
    outputs = [output["text"] for output in server.generate(text=["a", "b", "c"], sampling_params=body)]
    for text, pattern in zip(outputs, ("[ab]{4}", "[78]", "z[xy]"), strict=True):
        assert re.fullmatch(pattern, text)


def test_an_answer_that_is_cut_off_says_so_and_is_counted(server: Server) -> None:
    before = server.metrics()[INVALID]
    body = {"messages": HELLO, "response_format": FORMAT, "max_tokens": 5}
    (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    assert (choice["finish_reason"], choice["structured_output_valid"]) == ("length", False)
    events = read_events(server.post("/v1/chat/completions", **body, stream=True).text.split("\n"))
    last = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    assert [chunk.get("structured_output_valid") for chunk in last] == [None] * (len(last) - 1) + [False]
    native = server.generate(text="a", sampling_params={"regex": "a{9}", "max_new_tokens": 3})
    assert native["meta_info"]["structured_output_valid"] is False
    (stopped,) = choices(server, "/v1/completions", prompt="x", guided_regex="a{9}", stop="aaa")
    assert (stopped["finish_reason"], stopped["structured_output_valid"]) == ("stop", False)
    assert server.metrics()[INVALID] == before + 4


@every(
    ("field", "param", "part"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(" * 100_000}, "guided_regex", "invalid regex"),
        ({"guided_regex": "a" * 2_000_000}, "guided_regex", "more than 1048576 bytes"),
        ({"guided_json": '{"items":' * 50_000}, "guided_json", "deep"),
        ({"guided_json": {"not": {"pattern": "a"}}}, "guided_json", "Unimplemented keys"),
        ({"guided_grammar": 'root ::= "a" ' + "(" * 5000}, "guided_grammar", "refused"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "send one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends where the grammar does"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "ends where the grammar does"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", "none of the tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids", "none of the tokens"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "JSON schema"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "_"}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "send one of them",
        ),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_a_400_that_names_its_field(
    server: Server, field: dict[str, Any], param: str, part: str
) -> None:
    response = server.post("/v1/completions", prompt="a", **field)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert len(error["message"]) < 900


def test_hostile_grammars_do_not_stop_a_stream(server: Server) -> None:
    """They are compiled or refused while a stream goes on, and the next answer is right."""
    hostile = [
        {"guided_regex": "a{49000}"},
        {"guided_regex": "a{2000000000,2147483647}"},
        {"guided_regex": "((a{1,1000}){1,1000}){1,1000}b"},
        {"guided_regex": "(.*a.{200}){9}"},
        {"guided_regex": "(x+x+)+y"},
        {"guided_choice": [f"value number {number}" for number in range(10_000)]},
        {"guided_json": {"enum": [f"value number {number}" for number in range(10_000)]}},
        {
            "guided_json": {
                "type": "object",
                "properties": {f"p{n}": {"type": "string", "maxLength": n + 1} for n in range(2000)},
            }
        },
        {"guided_json": {"type": "string", "pattern": "^(a|b|c|ab|bc|abc){1,5000}$"}},
        {
            "guided_grammar": "start: "
            + " ".join(f"r{n}?" for n in range(500))
            + "\n"
            + "\n".join(f'r{n}: "a" | r{(n * 7 + 1) % 500}' for n in range(500))
        },
    ]

    async def run() -> tuple[int, list[int]]:
        async with server.asynchronous() as client:
            free = {"prompt": "a", "max_tokens": CONTEXT // 4, "ignore_eos": True, "stream": True}
            streamed = asyncio.create_task(client.post("/v1/completions", json=free))
            answers = [
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 30, **fields}) for fields in hostile
            ]
            statuses = [response.status_code for response in await asyncio.gather(*answers)]
            return (await streamed).status_code, statuses

    status, statuses = asyncio.run(run())
    assert status == 200
    assert set(statuses) <= {200, 400}
    (text,) = chat(server, guided_choice=["still here"])
    assert text == "still here"
    server.wait_pages_back()


def test_a_lost_process_is_replaced(server: Server) -> None:
    """The system may kill the one that compiles grammars: that request may be sent again, and later ones are served."""
    chat(server, guided_regex="abc")
    compilers = server.children("srv.grammar.child")
    assert compilers
    for pid in compilers:
        os.kill(pid, signal.SIGKILL)
    statuses = [
        server.post("/v1/completions", prompt="a", guided_regex=f"x{number}").status_code for number in range(4)
    ]
    assert statuses[-1] == 200
    assert set(statuses) <= {200, 503}
