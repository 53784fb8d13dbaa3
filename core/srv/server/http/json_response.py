"""A response with a JSON body."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
