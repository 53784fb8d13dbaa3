"""`/v1/batches`: requests that are read from a file, as OpenAI's API has them.

Must not know how lines are served.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, get_args

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.batches.files import FileStore
from srv.server.batches.runner import Batch, BatchRunner
from srv.server.http.auth import caller_of, owner_of
from srv.server.http.json_response import json_response
from srv.server.protocols.openai.listing import page
from srv.server.request.fields import Refused, RequestBody
from srv.server.service import Service

DEFAULT_LISTED, MAX_LISTED = 20, 100
MAX_METADATA, MAX_LABEL_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
BatchEndpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"]
BATCH_ENDPOINTS: tuple[BatchEndpoint, ...] = get_args(BatchEndpoint)


class BatchBody(RequestBody):
    input_file_id: str = Field(
        max_length=256, description="A file with one request per line: custom_id, method, url and body."
    )
    endpoint: BatchEndpoint = Field(description="The endpoint of all lines.")
    completion_window: Literal["24h"] = Field(description="Lines that have not begun after this time are not served.")
    metadata: dict[str, str] | None = Field(None, description="At most 16 labels, which the batch object repeats.")
    output_expires_after: Annotated[object, Refused("files are kept until they are deleted")] = None


class Batches:
    """The endpoints, one method each."""

    def __init__(self, service: Service, store: FileStore, runner: BatchRunner) -> None:
        self.service, self._store, self._runner = service, store, runner

    async def create(self, request: Request) -> Response:
        self.service.lifecycle.check_accepting()
        body = BatchBody.parse(await self.service.body(request))
        labels, caller = body.metadata or {}, caller_of(request)
        if len(labels) > MAX_METADATA or any(
            len(name) > MAX_LABEL_LENGTH or len(value) > MAX_VALUE_LENGTH for name, value in labels.items()
        ):
            raise RequestError(
                f"metadata must have at most {MAX_METADATA} entries, with names of at most {MAX_LABEL_LENGTH} and"
                f" values of at most {MAX_VALUE_LENGTH} characters",
                code="invalid_value",
                param="metadata",
            )
        file = await asyncio.to_thread(self._store.hold, caller.owner, body.input_file_id, "input_file_id")
        try:
            batch = self._runner.create(caller, file, body.endpoint, labels)
        except BaseException:
            self._store.release(file)
            raise
        return json_response(batch.shown())

    async def list(self, request: Request) -> Response:
        batches = self._runner.all(owner_of(request))
        return json_response(page(batches, request.query_params, Batch.shown, DEFAULT_LISTED, MAX_LISTED))

    async def read(self, request: Request) -> Response:
        return json_response(self._batch(request).shown())

    async def cancel(self, request: Request) -> Response:
        batch = self._batch(request)
        self._runner.cancel(batch)
        return json_response(batch.shown())

    def _batch(self, request: Request) -> Batch:
        return self._runner.get(owner_of(request), request.path_params["batch"])
