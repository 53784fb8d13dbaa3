"""`/v1/files`: files for batches, and those with their results, as OpenAI's API has them.

Must not know how files are stored or what they contain.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from srv.errors import RequestError
from srv.server.batches.files import BatchFile, FileStore
from srv.server.batches.multipart import FormPart, read_form
from srv.server.http.auth import owner_of
from srv.server.http.body import HeldShare, read_bytes
from srv.server.http.json_response import json_response
from srv.server.protocols.openai.listing import page
from srv.server.request.fields import shorten
from srv.server.service import Service

MAX_LISTED = 10_000
PURPOSE = "batch"
_FIELDS = ("file", "purpose")


class Files:
    """The endpoints, one method each."""

    def __init__(self, service: Service, store: FileStore) -> None:
        self.service, self._store = service, store

    async def upload(self, request: Request) -> Response:
        self.service.lifecycle.check_accepting()
        share: HeldShare = request.scope["srv.body"]
        body = await read_bytes(request, self.service.settings.body_limits, share)
        form = await asyncio.to_thread(read_form, body, request.headers.get("content-type", ""))
        _check(form)
        file = form["file"]
        name = file.filename or "file.jsonl"
        stored = await asyncio.to_thread(self._store.put, owner_of(request), name, PURPOSE, file.data)
        return json_response(stored.shown())

    async def list(self, request: Request) -> Response:
        query = request.query_params
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise RequestError(
                f"order = {shorten(order)} is refused: it must be asc or desc", code="invalid_value", param="order"
            )
        owner = owner_of(request)

        def show() -> Response:  # of thousands of files
            files = [file for file in self._store.all(owner) if query.get("purpose", file.purpose) == file.purpose]
            ordered = files if order == "asc" else files[::-1]
            return json_response(page(ordered, query, BatchFile.shown, MAX_LISTED, MAX_LISTED))

        return await asyncio.to_thread(show)

    async def read(self, request: Request) -> Response:
        return json_response((await self._file(request)).shown())

    async def content(self, request: Request) -> Response:
        return await asyncio.to_thread(Download, self._store, owner_of(request), request.path_params["file"])

    async def delete(self, request: Request) -> Response:
        name = request.path_params["file"]
        await asyncio.to_thread(self._store.delete, owner_of(request), name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> BatchFile:
        return await asyncio.to_thread(self._store.get, owner_of(request), request.path_params["file"])


class Download(FileResponse):
    """The content of a file, which cannot be deleted before the response has ended. Call the constructor in a thread.

    Raises RequestError if the owner has no such file, or if it cannot be read.
    """

    def __init__(self, store: FileStore, owner: str, name: str) -> None:
        self._store, self._file = store, store.hold(owner, name)
        path = store.path(self._file)
        try:
            stat = store.guarded(path.stat)
        except BaseException:
            store.release(self._file)
            raise
        super().__init__(path, media_type="application/octet-stream", stat_result=stat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._store.release(self._file)


def _check(form: dict[str, FormPart]) -> None:
    """Raises RequestError for missing or unknown fields, and for another purpose."""
    for name in form:
        if name not in _FIELDS:
            raise RequestError(
                f"unknown field {shorten(name)}: a form has file and purpose; remove it",
                code="unknown_field",
                param=shorten(name),
            )
    for name in _FIELDS:
        if name not in form:
            raise RequestError(f"{name} is required", code="missing_field", param=name)
    if form["file"].filename is None:
        raise RequestError(
            "file is refused: it is a text and no file, without a filename; send it as curl -F file=@NAME does",
            code="invalid_value",
            param="file",
        )
    purpose = form["purpose"].data.decode("utf-8", "replace")
    if purpose != PURPOSE:
        raise RequestError(
            f"purpose = {shorten(purpose)} is refused: files are for batches only; send {PURPOSE}",
            code="invalid_value",
            param="purpose",
        )
