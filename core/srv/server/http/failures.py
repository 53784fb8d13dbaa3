"""Errors as HTTP responses, in the format of the request's protocol and never with a traceback.

Owns OpenAI's format, in which errors are described first (`srv.server.http.error_shapes` translates them), the mapping
from exceptions to status codes, and the handlers. Must not know any endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from srv.errors import EngineDead, RequestError
from srv.server.http.error_shapes import shaped

RETRY_AFTER_SECONDS = 5
log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def error_type(status: int) -> str:
    if status >= 500:
        return "service_unavailable_error" if status == 503 else "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_body(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, object]:
    """OpenAI's format: {"error": {"message", "type", "param", "code"}}."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, object]]:
    """(HTTP status, error body) for an exception that was raised while a request was served."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.message, error.status, error.code, error.param)
    if isinstance(error, EngineDead):
        return 503, error_body(f"the engine is not running: {error}", 503, "engine_dead")
    return 500, error_body("the server failed on this request; see its log", 500, "internal_error")


def error_response(
    status: int, body: Mapping[str, object], headers: Mapping[str, str] | None = None, scope: Scope | None = None
) -> Response:
    """`body`: in OpenAI's format. `scope`: of the request, whose protocol the response follows."""
    body, added = (body, {}) if scope is None else shaped(scope, status, body)
    extra = {**added, **(headers or {})}
    if status == 503:
        extra.setdefault("retry-after", str(RETRY_AFTER_SECONDS))
    if status == 401:
        extra.setdefault("www-authenticate", "Bearer")
    if status in (408, 413):
        extra.setdefault("connection", "close")  # the rest of the body is not read
    return Response(msgspec.json.encode(body), status, extra, "application/json")


def report(scope: Scope, status: int, body: Mapping[str, object]) -> None:
    """Pass the error body of a response to the function that the app was installed with."""
    scope["app"].state.refused(status, body)


async def _srv_error_handler(request: Request, error: Exception) -> Response:
    status, body = describe(error)
    report(request.scope, status, body)
    return error_response(status, body, scope=request.scope)


async def _http_exception_handler(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404 and error.detail == "Not Found":  # of the router; a handler says what is missing
        message, code = f"there is no {method} {path}; see /openapi.json for all endpoints", "unknown_path"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{path} does not support {method}; use {allowed}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    body = error_body(message, error.status_code, code)
    report(request.scope, error.status_code, body)
    return error_response(error.status_code, body, error.headers, request.scope)


async def _validation_handler(request: Request, error: Exception) -> Response:
    """For routes of plugins, whose parameters FastAPI validates. The routes of `srv` validate bodies themselves."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    body = error_body(f"{where}: {first['msg']}", 422, "invalid_value", where)
    report(request.scope, 422, body)
    return error_response(422, body, scope=request.scope)


async def _disconnect_handler(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it: the client disconnected while it was sending the body


def unexpected_response(scope: Scope, error: Exception) -> Response:
    """The response to an unexpected exception: a 500. The only place that logs it, with its traceback."""
    log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    status, body = describe(error)
    return error_response(status, body, scope=scope)


def install(app: FastAPI, refused: Callable[[int, Mapping[str, object]], None]) -> None:
    """Register the handlers of expected exceptions. `refused` is called with the status and body of each error."""
    app.state.refused = refused
    app.add_exception_handler(RequestError, _srv_error_handler)
    app.add_exception_handler(EngineDead, _srv_error_handler)
    app.add_exception_handler(HTTPException, _http_exception_handler)
    app.add_exception_handler(RequestValidationError, _validation_handler)
    app.add_exception_handler(ClientDisconnect, _disconnect_handler)
