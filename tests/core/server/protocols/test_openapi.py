"""The OpenAPI document: every route that the server answers, with its parameters and the fields of its body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_support import serving
from starlette.routing import Route

pytestmark = pytest.mark.anyio
CANCELS = {"/v1/responses/{response}/cancel", "/v1/batches/{batch}/cancel"}
WITHOUT_BODY = {  # in JSON
    *("/flush_cache", "/stop_profile", "/v1/files", *CANCELS),
    *(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")),
}


def references(value: Any) -> Iterator[str]:
    """All references in a part of a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for member in value.values():
            yield from references(member)
    elif isinstance(value, list):
        for element in value:
            yield from references(element)


async def test_the_document_describes_every_route() -> None:
    async with serving() as server:
        document = (await server.http.get("/openapi.json")).json()
        served = {
            (route.path.replace(":path", ""), method.lower())
            for route in server.app.router.routes
            if isinstance(route, Route) and not route.path.startswith(("/docs", "/redoc"))
            for method in (route.methods or set()) - {"HEAD"}
        }
        described = {(path, method) for path, operations in document["paths"].items() for method in operations}
        assert described == served
        identifiers = set()
        for path, method in described:
            operation = document["paths"][path][method]
            identifiers.add(operation["operationId"])
            assert {"200", "default"} <= operation["responses"].keys()
            named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert ("requestBody" in operation) == (method == "post" and path not in WITHOUT_BODY)
        assert len(identifiers) == len(described)


async def test_bodies_have_fields_and_every_reference_exists() -> None:
    async with serving() as server:
        document = (await server.http.get("/openapi.json")).json()
        for reference in references(document):
            target: Any = document
            for part in reference.removeprefix("#/").split("/"):
                target = target[part]
            assert target
        for path, field in (
            ("/v1/completions", "prompt"),
            ("/generate", "sampling_params"),
            ("/tokenize", "messages"),
            ("/detokenize", "tokens"),
            ("/abort_request", "rid"),
            ("/v1/embeddings", "input"),
        ):
            content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            name = content["schema"]["$ref"].rpartition("/")[2]
            assert field in document["components"]["schemas"][name]["properties"]


async def test_a_missing_path_is_an_error_of_the_described_form() -> None:
    async with serving() as server:
        response = await server.http.get("/nothing")
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
