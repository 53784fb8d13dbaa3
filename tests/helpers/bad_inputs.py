"""Requests that must be refused, as bytes, with the status and the code that the refusal must have.

They are for a server with the limits of `LIMITS`. Tests use them, and the benchmark of bad input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POOL_TOKENS, BODY_BYTES, STOP_STRINGS = 2048, 65536, 4
LIMITS = (
    "--max-total-tokens", str(POOL_TOKENS), "--max-request-bytes", str(BODY_BYTES),
    "--max-stop-strings", str(STOP_STRINGS),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bad:
    """A POST of `body` to `path`; the answer must have `status` and an error of `code`."""

    name: str
    path: str
    body: bytes
    code: str
    status: int = 400


def _completion(name: str, code: str, status: int = 400, **fields: object) -> Bad:
    return Bad(name, COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 4, **fields}).encode(), code, status)


def _chat(name: str, code: str, **fields: object) -> Bad:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **fields}
    return Bad(name, CHAT, json.dumps(body).encode(), code)


def _generate(name: str, code: str, **fields: object) -> Bad:
    return Bad(name, "/generate", json.dumps(fields).encode(), code)


BAD_INPUTS = (
    Bad("no JSON", COMPLETIONS, b"prompt=a", "invalid_json"),
    Bad("half JSON", COMPLETIONS, b'{"prompt": "a", "max_tok', "invalid_json"),
    Bad("nothing", CHAT, b"", "invalid_json"),
    Bad("deep JSON", COMPLETIONS, b"[" * 8000, "invalid_json"),
    Bad("NaN temperature", COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    Bad("infinite temperature", COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
    Bad("invalid UTF-8", COMPLETIONS, b'{"prompt": "\xff\xfe\x80"}', "invalid_utf8"),
    Bad("half a surrogate pair", COMPLETIONS, b'{"prompt": "\\ud800"}', "invalid_json"),
    Bad("an array", COMPLETIONS, b"[1, 2]", "invalid_type"),
    Bad("body over the limit", COMPLETIONS, b'{"prompt": "' + b"a" * (2 * BODY_BYTES) + b'"}', "body_too_large", 413),
    _completion("wrong type", "invalid_type", max_tokens="four"),
    _completion("wrong type of flag", "invalid_type", stream="yes"),
    _completion("unknown model", "model_not_found", 404, model="gpt-9"),
    _completion("negative number", "invalid_value", max_tokens=-1),
    _completion("huge number", "invalid_value", max_tokens=10**15),
    _completion("negative temperature", "invalid_value", temperature=-0.5),
    _completion("huge temperature", "invalid_value", temperature=1e30),
    _completion("huge n", "invalid_value", n=10**6),
    _completion("huge seed", "invalid_value", seed=2**63),
    _completion("empty prompt", "empty_prompt", prompt=""),
    _completion("prompt without tokens", "empty_prompt", prompt=[]),
    _completion("prompt over the context", "request_too_large", prompt=[5] * 9000),
    _completion("long text over the context", "request_too_large", prompt="word " * 10_000),
    _completion("more than the pool can hold", "request_too_large", max_tokens=POOL_TOKENS),
    _completion("token id outside the vocabulary", "invalid_token_id", prompt=[1, 49152]),
    _completion("negative token id", "invalid_token_id", prompt=[-1]),
    _completion("huge token id", "invalid_token_id", prompt=[10**18]),
    _completion("too many stop strings", "invalid_value", stop=["a"] * (STOP_STRINGS + 1)),
    _completion("empty stop string", "invalid_value", stop=""),
    _completion("long stop string", "invalid_value", stop="a" * 5000),
    _completion("bias on no token", "invalid_token_id", logit_bias={"99999": 1}),
    _completion("field that does not exist", "unknown_field", temprature=1),
    _completion("field not implemented", "not_implemented", best_of=2),
    _chat("tools", "no_tool_format", tools=[{"type": "function", "function": {"name": "f"}}]),
    _chat("response_format", "invalid_value", response_format={"type": "jsonobject"}),
    _chat(
        "an image",
        "not_implemented",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    _chat("no messages", "invalid_value", messages=[]),
    _chat("unknown role", "invalid_value", messages=[{"role": "wizard", "content": "a"}]),
    _generate("neither text nor ids", "invalid_value"),
    _generate("text and ids", "invalid_value", text="a", input_ids=[1]),
    _generate("ids of the wrong type", "invalid_type", input_ids=["a"]),
)
