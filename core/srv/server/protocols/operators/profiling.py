"""`/start_profile` and `/stop_profile`: a recording of what the ranks compute, for https://ui.perfetto.dev.

Must not know what records it (`srv.worker.profiler`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from srv.commands import StartProfile, StopProfile
from srv.errors import RequestError
from srv.server.http.json_response import json_response
from srv.server.request.fields import Refused, RequestBody
from srv.server.service import Service

MAX_FOLDERS = 16  # that a server makes; each recording has hundreds of megabytes
_ALL = "the recording has everything that torch's profiler can record on this device"


class StartProfileBody(RequestBody):
    output_dir: str | None = Field(
        None,
        description="Existing folder on the server for the traces; needs a server with --admin-api-key. By default a"
        " new folder in its folder for temporary files.",
    )

    start_step: Annotated[object, Refused("a first step; recording starts at once")] = None
    num_steps: Annotated[object, Refused("a number of steps; send /stop_profile")] = None
    activities: Annotated[object, Refused(f"a choice of activities; {_ALL}")] = None
    profile_by_stage: Annotated[object, Refused("one recording per stage")] = None
    with_stack: Annotated[object, Refused("recording call stacks")] = None
    record_shapes: Annotated[object, Refused("recording shapes")] = None
    profile_id: Annotated[object, Refused("names of recordings; the response has the paths of the files")] = None
    profile_prefix: Annotated[object, Refused("names of recordings; the response has the paths of the files")] = None


class Profiling:
    """The endpoints, one method each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._made: list[Path] = []

    async def start(self, request: Request) -> Response:
        self._service.lifecycle.check_accepting()
        body = StartProfileBody.parse(await self._service.optional_body(request))
        folder = self._folder(body.output_dir)
        started = False
        try:
            for answer in await self._service.client.control(StartProfile(str(folder))):
                if answer.error is not None:
                    raise _failed("started", answer.error)
            started = True
        finally:
            if not started and body.output_dir is None:
                folder.rmdir()
        return json_response({"recording": True, "output_dir": str(folder)})

    async def stop(self, request: Request) -> Response:
        self._service.lifecycle.check_accepting()
        answers = await self._service.client.control(StopProfile())
        for answer in answers:
            if answer.error is not None:
                raise _failed("stopped", answer.error)
        files = [file for answer in answers for file in answer.files]
        return json_response({"recording": False, "files": files, "open_with": "https://ui.perfetto.dev"})

    def _folder(self, name: str | None) -> Path:
        if name is None:
            self._made = [place for place in self._made if place.exists()]
            if len(self._made) >= MAX_FOLDERS:
                raise _failed(
                    "started", f"there are {MAX_FOLDERS} recordings in {tempfile.gettempdir()}; remove their folders"
                )
            self._made.append(Path(tempfile.mkdtemp(prefix="srv-profile-")))
            return self._made[-1]
        if self._service.settings.access.admin_key is None:
            raise RequestError(
                f"output_dir = {name[:200]!r} is refused: without --admin-api-key, anyone who may send requests could"
                " write there; leave it out, and the response names the folder",
                code="output_dir_without_admin_key",
                param="output_dir",
            )
        folder = Path(name)
        if not folder.is_absolute() or not folder.is_dir():
            raise RequestError(
                f"output_dir = {name[:200]!r} is refused: it must be the absolute path of a folder that exists on the"
                " server",
                code="invalid_value",
                param="output_dir",
            )
        return folder


def _failed(what: str, reason: str) -> RequestError:
    return RequestError(f"the recording was not {what}: {reason}", code="profile_refused")
