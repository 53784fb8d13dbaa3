"""`chat_template_kwargs`: names that the template language or the server sets are refused by name."""

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
