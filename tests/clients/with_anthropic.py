"""Uses a server through Anthropic's client, and prints what it got as JSON: python FILE BASE_URL MODEL."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

base_url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="any", max_retries=0)
asked: dict[str, Any] = {
    "model": model,
    "max_tokens": 6,
    "extra_body": {"temperature": 0},
    "system": [{"type": "text", "text": "a b", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "c d"}]}],
    "metadata": {"user_id": "u"},
}
answer = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_message()
beta = client.beta.messages.create(**asked, betas=["interleaved-thinking-2025-05-14"])
counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "system", "messages")})
try:
    client.messages.create(**{**asked, "model": "gpt-9"})
    refused: tuple[str, str | None] = ("", None)
except anthropic.NotFoundError as error:
    refused = (error.message, error.request_id)
print(
    json.dumps(
        {
            "text": answer.content[0].text,
            "stop_reason": answer.stop_reason,
            "input": answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0),
            "output": answer.usage.output_tokens,
            "streamed": streamed.content[0].text,
            "streamed_output": streamed.usage.output_tokens,
            "kinds": [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]],
            "beta": beta.content[0].text,
            "counted": counted.input_tokens,
            "models": [entry.id for entry in client.models.list()],
            "refused": refused[0],
            "request_id": refused[1],
        }
    )
)
