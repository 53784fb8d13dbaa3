"""`/v1/embeddings`. Must not know how embeddings are computed."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.embedding import Embedding
from srv.server.http.events import while_connected
from srv.server.preprocessor import read_prompts
from srv.server.protocols.openai_fields import EmbeddingBody
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
        prompts, batch = read_prompts(fields.input, "input")
        preprocessor.check_count(len(prompts), 1, "input")
        special = fields.add_special_tokens is not False
        tokenized = [
            await preprocessor.tokenize(
                prompt, param=f"input[{index}]" if batch else "input", special=special, min_output=0
            )
            for index, prompt in enumerate(prompts)
        ]
        params = PoolingParams(pooling=pooling, dimensions=fields.dimensions, normalize=fields.normalize is not False)
        return ParsedEmbeddings(fields, tokenized, params)

    def _pooling(self) -> Pooling:
        pooling = self.service.settings.pooling
        if pooling is None:
            raise RequestError(
                "this server does not serve embeddings; start the server with --is-embedding",
                code="embeddings_disabled",
            )
        return pooling

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self.service.settings.hidden_size
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
        rid = parsed.fields.rid or f"embd-{uuid.uuid4().hex}"
        work = self.service.embed(parsed.prompts, parsed.params, rid, arrival)
        embeddings = await while_connected(request.receive, work)
        response = {
            "id": rid,
            "object": "list",
            "data": _data(embeddings, parsed.fields.encoding_format == "base64"),
            "model": self.service.settings.model_name,
            "usage": _usage(embeddings),
        }
        return Response(msgspec.json.encode(response), media_type="application/json")


def _data(embeddings: Sequence[Embedding], as_base64: bool) -> list[dict[str, object]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(each.vector).decode() if as_base64 else each.elements(),
        }
        for index, each in enumerate(embeddings)
    ]


def _usage(embeddings: Sequence[Embedding]) -> dict[str, object]:
    prompt_tokens = sum(each.prompt_tokens for each in embeddings)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in embeddings)},
    }
