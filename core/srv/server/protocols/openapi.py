"""The OpenAPI document of the server's own routes. Must not know any endpoint."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import srv
from srv.server.request.fields import RequestBody

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"], "description": "A stable identifier."},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. `returns`: the media type of its responses."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    returns: str = "application/json"


def openapi_document(
    endpoints: Sequence[Endpoint], bodies: Mapping[str, type[RequestBody]], root_path: str = ""
) -> dict[str, Any]:
    """An OpenAPI 3.1 document, generated from the schemas that validate the bodies. `bodies`: these, by path.

    root_path: where a proxy serves them.
    """
    schemas: list[tuple[type[RequestBody], JsonSchemaMode]] = [(body, "validation") for body in bodies.values()]
    references, definitions = models_json_schema(schemas, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {
        "/openapi.json": {"get": _operation("This document.", "application/json", operation_id="get /openapi.json")}
    }
    for endpoint in endpoints:
        operation = _operation(
            endpoint.summary, endpoint.returns, operation_id=f"{endpoint.method.lower()} {endpoint.path}"
        )
        if endpoint.method == "POST" and (body := bodies.get(endpoint.path)) is not None:
            content = {"application/json": {"schema": references[(body, "validation")]}}
            operation["requestBody"] = {"required": True, "content": content}
        if names := _PARAMETER.findall(endpoint.path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(_PARAMETER.sub(r"{\1}", endpoint.path), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "srv", "version": srv.__version__},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "key_header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"key": []}, {"key_header": []}],
    }


def _operation(summary: str, returns: str, *, operation_id: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "operationId": operation_id,
        "summary": summary,
        "responses": {
            "200": {"description": "Success", "content": {returns: {}}},
            "default": {"description": "An error", "content": error},
        },
    }
