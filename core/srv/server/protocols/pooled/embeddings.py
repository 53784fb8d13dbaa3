"""`/v1/embeddings`. Must not know how embeddings are computed."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.reply.tools import NO_TOOLS
from srv.server.embedding import Embedding
from srv.server.http.auth import caller_of
from srv.server.http.events import while_connected
from srv.server.http.json_response import json_response
from srv.server.protocols.common.conversations import render
from srv.server.protocols.openai.chat import read_conversation
from srv.server.protocols.openai.fields import EmbeddingBody
from srv.server.protocols.pooled.scores import usage_of
from srv.server.protocols.pooled.scoring import preceding_prompt
from srv.server.request.neutral import is_neutral
from srv.server.request.prompts import Prompt, read_prompts
from srv.server.request.sampling_fields import namespace_of
from srv.server.service import Service
from srv.types import Pooling, PoolingParams


@dataclass(frozen=True, slots=True)
class ParsedEmbeddings:
    """A valid request: its fields, its tokenized prompts and how they are pooled."""

    fields: EmbeddingBody
    prompts: list[list[int]]
    params: PoolingParams


class Embeddings:
    """The endpoint. The prompts of a body are one client request, which is aborted or fails as a whole."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def parse(self, body: object) -> ParsedEmbeddings:
        """Validate the body and tokenize its prompts. Raises RequestError."""
        pooling = self._pooling()
        fields = EmbeddingBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        self._check_dimensions(fields.dimensions)
        if fields.messages is not None:
            return await self._of_conversation(fields, pooling)
        if "input" not in fields.model_fields_set:
            raise RequestError("input is required; send it, or messages", code="missing_field", param="input")
        _refuse_for_input(fields)
        prompts, batch = read_prompts(fields.input, "input")
        if fields.prompt_name is not None or any(isinstance(prompt, str) for prompt in prompts):
            prefix = preceding_prompt(self.service.settings.head, pooling, fields.prompt_name)
            prompts = [_prefixed(prefix, prompt, fields.prompt_name) for prompt in prompts] if prefix else prompts
        preprocessor.check_count(len(prompts), 1, "input")
        params = [f"input[{index}]" if batch else "input" for index in range(len(prompts))]
        return await self._tokenized(fields, pooling, prompts, params, fields.add_special_tokens is not False)

    async def _of_conversation(self, fields: EmbeddingBody, pooling: Pooling) -> ParsedEmbeddings:
        """The embedding of the text that the chat template makes of a conversation."""
        for name in ("input", "prompt_name"):
            if getattr(fields, name) is not None:
                raise RequestError(
                    f"{name} is refused: the request has messages; send one of them", code="invalid_value", param=name
                )
        limit, variables = self.service.settings.context_length, fields.chat_template_kwargs or {}
        conversation = read_conversation(fields, variables, NO_TOOLS, limit)
        conversation = replace(conversation, begins_reply=bool(fields.add_generation_prompt))
        text = await render(self.service.preprocessor, conversation)
        return await self._tokenized(fields, pooling, [text], ["messages"], bool(fields.add_special_tokens))

    async def _tokenized(
        self, fields: EmbeddingBody, pooling: Pooling, prompts: list[Prompt], names: list[str], special: bool
    ) -> ParsedEmbeddings:
        preprocessor = self.service.preprocessor
        keep = preprocessor.kept(fields.truncate_prompt_tokens, 0)
        tokenized = await preprocessor.tokenize(prompts, names, special=special, min_output=0, keep=keep)
        normalize = self.service.settings.head.normalize if fields.normalize is None else fields.normalize
        params = PoolingParams(pooling=pooling, dimensions=fields.dimensions, normalize=normalize)
        return ParsedEmbeddings(fields, tokenized, params)

    def _pooling(self) -> Pooling:
        pooling = self.service.settings.pooling
        if pooling is None:
            raise RequestError(
                "this server does not serve embeddings; start the server with --is-embedding",
                code="embeddings_disabled",
            )
        if self.service.settings.head.labels:
            raise RequestError(
                f"{self.service.settings.model_name} has a classification head, and no embeddings; use /classify, or"
                " /rerank and /score if it has one label",
                code="no_embeddings",
            )
        return pooling

    def _check_dimensions(self, dimensions: int | None) -> None:
        size, allowed = self.service.settings.embedding_size, self.service.settings.head.dimensions
        if dimensions is not None and allowed and dimensions not in allowed:
            raise RequestError(
                f"dimensions = {dimensions} is refused: the model was trained for {', '.join(map(str, allowed))}",
                code="invalid_value",
                param="dimensions",
            )
        if dimensions is not None and dimensions > size:
            raise RequestError(
                f"dimensions = {dimensions} is refused: the model's embeddings have {size} elements; send at most that",
                code="invalid_value",
                param="dimensions",
            )

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        parsed = await self.parse(await self.service.body(request))
        rid = parsed.fields.own_id or f"embd-{uuid.uuid4().hex}"
        namespace = namespace_of(parsed.fields.cache_salt, parsed.fields.extra_key)
        work = self.service.embed(parsed.prompts, parsed.params, rid, arrival, caller_of(request), namespace)
        embeddings = await while_connected(request.receive, work)
        response = {
            "id": rid,
            "object": "list",
            "data": _data(embeddings, parsed.fields.encoding_format == "base64"),
            "model": self.service.settings.model_name,
            "usage": usage_of(embeddings, self.service.settings.cache_report),
        }
        return json_response(response)


def _refuse_for_input(fields: EmbeddingBody) -> None:
    for name in ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"):
        if not is_neutral(name, getattr(fields, name)):
            raise RequestError(
                f"{name} is refused: it needs messages instead of input", code="invalid_value", param=name
            )


def _prefixed(prefix: str, prompt: Prompt, name: str | None) -> Prompt:
    if isinstance(prompt, str):
        return prefix + prompt
    if name is None:
        return prompt  # whoever sends token ids has them begin as they should
    raise RequestError(
        "prompt_name is refused: it needs input as text, not as token ids", code="invalid_value", param="prompt_name"
    )


def _data(embeddings: Sequence[Embedding], as_base64: bool) -> list[dict[str, object]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(embedding.vector).decode() if as_base64 else embedding.elements(),
        }
        for index, embedding in enumerate(embeddings)
    ]
