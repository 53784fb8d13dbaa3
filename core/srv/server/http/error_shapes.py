"""The form of an error body by path: Anthropic's under `/v1/messages`, OpenAI's elsewhere.

    {"error": {"message", "type", "param", "code"}}                           OpenAI
    {"type": "error", "error": {"type", "message"}, "request_id"}             Anthropic

Errors are described in OpenAI's form first, which hooks of plugins see; this module translates it for the response.
Sources: Anthropic's API reference (errors). Must not know exceptions or endpoints.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

ANTHROPIC_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
THREADS = "thread_unsupported_request"  # Anthropic's SDK then sends the whole conversation
_DETAILED = (THREADS,)  # codes of Anthropic's, which its SDK reads


def speaks_anthropic(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def request_id(scope: Scope) -> str:
    """The id of a request in the header `request-id` and in Anthropic's errors; the same at every call."""
    if "srv.request_id" not in scope:
        scope["srv.request_id"] = f"req_{uuid.uuid4().hex}"
    rid: str = scope["srv.request_id"]
    return rid


def anthropic_error(status: int, body: Mapping[str, Any], request: str | None) -> dict[str, object]:
    """`body`: the same error in OpenAI's form. Its message names the field at fault."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": body["error"]["message"]}
    if body["error"]["code"] in _DETAILED:
        error["details"] = {"error_code": body["error"]["code"]}
    return {"type": "error", "error": error, "request_id": request}


def shaped(scope: Scope, status: int, body: Mapping[str, Any]) -> tuple[Mapping[str, object], dict[str, str]]:
    """The error body in the form of the request's protocol, and the headers that this protocol adds."""
    if not speaks_anthropic(scope):
        return body, {}
    request = request_id(scope)
    return anthropic_error(status, body, request), {"request-id": request}
