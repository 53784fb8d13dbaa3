"""Uses a server through LangChain's OpenAI client, and prints what it got as JSON: python FILE BASE_URL MODEL."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]
chat = ChatOpenAI(
    model=model,
    base_url=base_url,
    api_key="any",
    max_tokens=6,
    temperature=0,
    seed=-3,
    max_retries=0,
    stream_usage=True,
    model_kwargs={"user": "u", "parallel_tool_calls": True},
)
answer = chat.invoke([("system", "a b"), ("human", "c d")])
parts = list(chat.stream([("system", "a b"), ("human", "c d")]))
scored = chat.bind(logprobs=True, top_logprobs=2).batch(["a", "b"])
print(
    json.dumps(
        {
            "text": answer.content,
            "tokens": answer.usage_metadata["output_tokens"],
            "finish": answer.response_metadata["finish_reason"],
            "fingerprint": answer.response_metadata["system_fingerprint"],
            "streamed": "".join(part.content for part in parts),
            "streamed_tokens": [part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata],
            "scored": [len(message.response_metadata["logprobs"]["content"]) for message in scored],
        }
    )
)
