"""Each sampling parameter is declared once, and its value reaches the engine from every endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import added_parameter
import msgspec
import pytest
from args_world import model, user
from every import every
from server_support import serving

from srv.args.resolve import resolve
from srv.errors import Refusal
from srv.sample.third_party import ProcessorFacts
from srv.server.protocols.native.fields import NativeSampling
from srv.server.protocols.native.sampling_defaults import sampling_defaults
from srv.server.protocols.openai.fields import ChatBody, CompletionBody
from srv.server.request.custom_processors import MAX_PARAMS_BYTES
from srv.types import SamplingOptions, SamplingParams

pytestmark = pytest.mark.anyio

# A value of every parameter, other than its default: JSON, and what the engine gets if that differs.
VALUES: dict[str, Any] = {
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.75,
    "logit_bias": {"5": 2.0},
    "stop_token_ids": [9, 8],
    "allowed_token_ids": [5, 9],
    "ignore_eos": True,
    "max_tokens": 20,
    "seed": 11,
}
AT_THE_ENGINE: dict[str, Any] = {"logit_bias": ((5, 2.0),), "stop_token_ids": (9, 8), "allowed_token_ids": (5, 9)}
# Each protocol requests these in its own way; the endpoints' own tests cover them.
CUSTOM = {"custom_processor", "custom_params"}
SCORES = {"logprobs", "prompt_logprobs", "prompt_logprobs_start", "logprob_token_ids"}
REQUESTED_OTHERWISE = {*SCORES, "hidden_states", "thinking", "banned", *CUSTOM}


def test_the_table_has_every_parameter() -> None:
    assert set(VALUES) | REQUESTED_OTHERWISE == set(SamplingParams.__struct_fields__)
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    assert not [name for name, value in VALUES.items() if AT_THE_ENGINE.get(name, value) == defaults[name]]


@every(
    ("path", "prompt", "body"),
    [
        ("/v1/completions", {"prompt": "a"}, CompletionBody),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ChatBody),
        ("/generate", {"text": "a"}, NativeSampling),
    ],
)
async def test_every_parameter_reaches_the_engine(path: str, prompt: dict[str, Any], body: type) -> None:
    fields = {body.spelled[name]: value for name, value in VALUES.items()}
    async with serving() as server:
        body_fields = {"sampling_params": fields} if body is NativeSampling else fields
        response = await server.post(path, **prompt, **body_fields)
        assert response.status_code == 200, response.text
        params = server.engine.received[0].params
        assert {name: getattr(params, name) for name in VALUES} == {**VALUES, **AT_THE_ENGINE}


def test_a_new_parameter_needs_its_declaration_only() -> None:
    """Its bounds are checked, its names are known, and its value arrives through the messages of the processes."""
    requests = [
        ("/v1/completions", {"prompt": "a", "typical_p": 0.25}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "typical_p": 0.5}),
        ("/generate", {"text": "a", "sampling_params": {"typical": 0.75}}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "typical_p": 2}),
        ("/generate", {"text": "a", "sampling_params": {"typical_p": 0.5}}),
    ]
    result = subprocess.run(
        [sys.executable, added_parameter.__file__, json.dumps(requests)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    problems, arrived = json.loads(result.stdout)
    assert arrived == [0.25, 0.5, 0.75, 1.0]
    assert problems[:4] == [None] * 4
    assert problems[4] == "typical_p = 2 is refused: it must be less than or equal to 1. Typical sampling."
    assert problems[5] == "unknown field sampling_params.typical_p: it is called sampling_params.typical here"


def test_parameters_of_the_engine_are_those_of_the_client_and_two_resolved_ones() -> None:
    assert set(SamplingParams.__struct_fields__) - set(SamplingOptions.__struct_fields__) == {"max_tokens", "seed"}


@every(
    "field",
    [
        {"n": 2},
        {"json_schema": '{"type": "object"}'},
        {"regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
        {"custom_params": {"a": 1}},
    ],
)
def test_defaults_of_the_operator_have_nothing_that_only_a_request_can_ask_for(field: dict[str, Any]) -> None:
    preferred = json.dumps({"temperature": 0.5, **field})
    resolved = resolve(user(preferred_sampling_params=preferred, sampling_defaults="openai"))
    with pytest.raises(Refusal) as caught:
        sampling_defaults(resolved, model())
    (name,) = field
    assert f"{name} is refused" in str(caught.value)
    fine = resolve(user(preferred_sampling_params='{"temperature": 0.5}', sampling_defaults="openai"))
    assert sampling_defaults(fine, model()) == {"temperature": 0.5}


async def test_the_parameters_of_a_processor_have_a_limit() -> None:
    processor = ProcessorFacts("any", "nowhere:Any", lambda params: None)
    async with serving(custom_processors={"any": processor}) as server:
        for size, status in ((MAX_PARAMS_BYTES // 2, 200), (MAX_PARAMS_BYTES, 400)):
            body = {"prompt": "a", "custom_logit_processor": "any", "custom_params": {"a": "x" * size}, "max_tokens": 1}
            response = await server.post("/v1/completions", **body)
            assert response.status_code == status
        error = response.json()["error"]
        assert error["param"] == "custom_params"
        assert f"the limit is {MAX_PARAMS_BYTES}" in error["message"]
