"""The settings of the API process, which do not change while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from srv.types import Pooling

FULL_PROMPTS_PER_BODY = 4  # prompts of token ids, each as long as the context


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`values`: JSON values per body; a container counts as 16. `seconds`: time for the body to arrive."""

    bytes: int = 8 * 1024 * 1024
    values: int = 131_072
    seconds: float = 60.0


DEFAULT_BODY_LIMITS = BodyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and names. `context_length` and `max_request_tokens` count prompt and output tokens together.

    `context_length`: --context-length, else the model's. `max_request_tokens`: the smaller of that and the KV pool
    (from `Ready`). `vocab_size` limits token ids in requests. `max_prompt_bytes`: longer texts are refused without
    tokenizing them (None: derived from the context length and the longest token). `max_request_values` limits the JSON
    values per body (None: enough for a few prompts of token ids). `hidden_size`: elements of an embedding and of a
    hidden state. `pooling`: how prompts are embedded; None: `/v1/embeddings` is disabled. `model_info` and
    `server_info` are returned unchanged.
    """

    model_name: str
    context_length: int
    max_request_tokens: int
    vocab_size: int
    hidden_size: int
    pooling: Pooling | None = None
    return_hidden_states: bool = False
    api_key: str | None = None
    max_request_bytes: int = DEFAULT_BODY_LIMITS.bytes
    max_request_values: int | None = None
    body_seconds: float = DEFAULT_BODY_LIMITS.seconds
    max_stop_strings: int = 16
    max_sequences: int = 1024  # per HTTP request: prompts times n
    max_prompt_bytes: int | None = None
    health_generate_seconds: float = 20.0
    random_seed: int | None = None  # determines the seeds of requests without one, in order of arrival
    created: int = 0  # Unix time reported for the model
    model_info: Mapping[str, Any] = field(default_factory=dict)
    server_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body_limits(self) -> BodyLimits:
        values = self.max_request_values
        if values is None:
            values = max(DEFAULT_BODY_LIMITS.values, FULL_PROMPTS_PER_BODY * self.context_length)
        return BodyLimits(self.max_request_bytes, values, self.body_seconds)

    @property
    def request_token_limit(self) -> int:
        """The maximum number of tokens per request, prompt and output."""
        return min(self.context_length, self.max_request_tokens)
