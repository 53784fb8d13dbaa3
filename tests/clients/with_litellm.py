"""Uses a server through LiteLLM, and prints what it got as JSON: python FILE BASE_URL MODEL."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

base_url, model = sys.argv[1:]
settings: dict[str, Any] = {"api_base": base_url, "api_key": "any", "max_tokens": 5, "temperature": 0, "num_retries": 0}
messages = [{"role": "user", "content": "a b"}]
asking_for_nothing = {"user": "u", "parallel_tool_calls": True, "extra_body": {"metadata": {"a": "b"}, "store": False}}
answer = litellm.completion(model=f"openai/{model}", messages=messages, **settings, **asking_for_nothing)
chunks = list(
    litellm.completion(
        model=f"openai/{model}", messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
)
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="a b", **settings)
print(
    json.dumps(
        {
            "text": answer.choices[0].message.content,
            "tokens": answer.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "streamed_tokens": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)],
            "completed": text.choices[0].text,
        }
    )
)
