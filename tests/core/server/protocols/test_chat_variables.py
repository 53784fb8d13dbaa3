"""What requests say of the chat template: variables, of which some names are refused, and a template of their own."""

from __future__ import annotations

import pytest
from every import every
from server_support import serving

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]
RESERVED = ("self", "messages", "add_generation_prompt", "tools", "loop", "caller", "varargs", "kwargs", "super",
            "bos_token", "unk_token", "raise_exception", "namespace", "range")  # fmt: skip


@every("name", RESERVED)
async def test_a_reserved_name_is_a_400_that_names_the_field(name: str) -> None:
    async with serving() as server:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await server.post(path, messages=HELLO, chat_template_kwargs={name: 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_names_of_python_parameters_are_ordinary_variables() -> None:
    async with serving() as server:
        for name in ("extra", "variables", "source", "environment", "name", "args", "cls"):
            response = await server.post("/tokenize", messages=HELLO, chat_template_kwargs={name: 1})
            assert response.status_code == 200, response.text


async def test_a_template_of_a_request_is_used_if_the_server_trusts_it() -> None:
    asked = {"messages": HELLO, "chat_template": "{{ 1 }}"}
    async with serving(trust_request_chat_template=True) as server:
        (plain, own_tokens) = [
            bytes((await server.post("/tokenize", **body)).json()["tokens"]) for body in ({"messages": HELLO}, asked)
        ]
        assert own_tokens == b"{{ 1 }}" + plain
        assert (await server.post("/v1/chat/completions", **asked, max_tokens=1)).status_code == 200
        assert bytes(server.engine.received[-1].tokens) == own_tokens
        assert (await server.post("/v1/embeddings", **asked)).status_code == 200
        for path, field in (("/tokenize", "prompt"), ("/v1/embeddings", "input")):
            refused = await server.post(path, **{field: "a", "chat_template": "b"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    async with serving() as server:
        for path in ("/tokenize", "/v1/chat/completions", "/v1/embeddings"):
            refused = await server.post(path, **asked)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (400, "templates_disabled", "chat_template")
            assert "start the server with --trust-request-chat-template" in error["message"]
