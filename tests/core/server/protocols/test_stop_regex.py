"""`stop_regex` of the endpoints that sample, over the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from every import every
from server_support import serving

from srv.errors import RequestError
from srv.server.request.sampling_fields import Sampling
from srv.server.request.stop_rules import check_stop_counts, compile_stops
from srv.server.text.regex_syntax import Characters
from srv.server.text.stop_regex import StopRegex
from srv.server.text.token_ids import TokenIdsOnly
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
OUTPUT = b"one 1 two 22 three"
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def engine() -> FakeEngine:
    return FakeEngine(script=lambda message: OUTPUT)


@every(("keep", "text"), [(False, "one 1 two "), (True, "one 1 two 22")])
async def test_generate_ends_where_the_expression_matches(keep: bool, text: str) -> None:
    async with serving(engine()) as server:
        body: dict[str, Any] = {
            "text": "a",
            "sampling_params": {"stop_regex": r"[0-9]{2}", "no_stop_trim": keep, "max_new_tokens": 50},
        }
        answer = (await server.post("/generate", **body)).json()
        assert answer["text"] == text
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"[0-9]{2}"}
        assert answer["meta_info"]["completion_tokens"] == len(text)
        *events, _ = await server.stream("/generate", **body)
        assert all(text.startswith(event["text"]) for event in events)
        assert events[-1]["text"] == text
        assert not server.engine.running  # it has been aborted, and generates no further


async def test_each_output_of_a_streamed_request_ends_by_itself() -> None:
    outputs = iter([b"x1 more", b"longer, then 2 more"])
    async with serving(FakeEngine(script=lambda message: next(outputs))) as server:
        body = {"prompt": "a", "n": 2, "max_tokens": 50, "stop_regex": [r"\d\s"], "stop": "never"}
        *chunks, _ = await server.stream("/v1/completions", **body)
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["x", "longer, then "]
        ends = [choice for chunk in chunks if (choice := chunk["choices"][0])["finish_reason"]]
        assert [end["matched_stop"] for end in ends] == [r"\d\s", r"\d\s"]


async def test_chat_takes_it_too() -> None:
    async with serving(engine()) as server:
        answer = (await server.post("/v1/chat/completions", **CHAT, max_tokens=50, stop_regex=["zzz", " T(?i)"])).json()
        assert answer["error"]["param"] == "stop_regex"
        answer = (await server.post("/v1/chat/completions", **CHAT, max_tokens=50, stop_regex=["zzz", "(?i) T"])).json()
        assert answer["choices"][0]["message"]["content"] == "one 1"


@every(
    ("value", "reason"),
    [
        ("(a*)*", "it matches the empty text"),
        ("(x+x+)+y$", "anchors"),
        ("((a{1000}){1000}){1000}", "it is too large"),
        (["a"] * 17, "has 17 regular expressions, the limit is 16"),
        (["a" * 100, "b" * 100], "may have 128"),
        ("(" * 1000, "groups inside each other"),
        ("a" * 1025, "at most 1024 characters"),
        ("", "empty string"),
        (7, "must be a string or an array of strings"),
        ([["a"]], "must contain only strings"),
    ],
)
async def test_a_refused_expression_is_a_400_that_names_the_field(value: object, reason: str) -> None:
    async with serving(engine()) as server:
        for path, body, param in (
            ("/generate", {"text": "a", "sampling_params": {"stop_regex": value}}, "sampling_params.stop_regex"),
            ("/v1/completions", {"prompt": "a", "stop_regex": value}, "stop_regex"),
        ):
            refused = await server.post(path, **body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param)
            assert reason in error["message"]
            assert param in error["message"]
        assert not server.engine.received


@every(
    "expressions",
    [
        ["a{,1000}"],
        ["((a|b){1000}){1000}"],
        [r"\w{500}" * 10],
        [r"\w{500}"] * 10,
        ["(){1000}" * 100],
        ["((){500}|a)b"] * 16,
        ["a"] * 50,
    ],
)
def test_expressions_that_are_too_large_are_refused_before_an_automaton_is_built(
    expressions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    build = StopRegex._build

    def counted(regex: StopRegex, node: Any) -> Any:
        built.append(node)
        return build(regex, node)

    def compiled() -> None:
        check_stop_counts(sampling, 16, str)
        compile_stops(sampling.stop_regex, "stop_regex")

    monkeypatch.setattr(StopRegex, "_build", counted)
    sampling = Sampling(stop_regex=tuple(expressions))
    with pytest.raises(RequestError, match=r"too large|has 50 regular expressions"):
        compiled()
    assert len(built) <= 1024  # of all expressions together
    assert sum(isinstance(node, Characters) for node in built) <= 128


async def test_expressions_that_make_backtracking_engines_stall_are_served() -> None:
    output = b"a" * 200
    async with serving(FakeEngine(script=lambda message: output)) as server:
        body = {"prompt": "a", "max_tokens": 200, "stop_regex": ["(a+)+b", "(a|aa)+c", "(.*)(.*)(.*)d"]}
        slow = asyncio.create_task(server.post("/v1/completions", **body))
        assert (await server.http.get("/health")).status_code == 200
        assert (await slow).json()["choices"][0]["text"] == output.decode()


async def test_it_needs_a_tokenizer() -> None:
    async with serving(engine(), TokenIdsOnly(300)) as server:  # type: ignore[arg-type]
        refused = await server.post("/v1/completions", prompt=[1, 2], stop_regex="a")
        assert refused.json()["error"]["code"] == "no_tokenizer"
