"""The HTTP application: its routes and its OpenAPI document.

A launcher needs only `create_app`. The caller runs `client.run()` as a task of the same event loop, and on SIGTERM
awaits `app.state.lifecycle.drain(seconds)` before it stops the HTTP server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import srv
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.client import EngineClient
from srv.server.fields import RequestBody
from srv.server.http import failures
from srv.server.http.auth import AuthMiddleware
from srv.server.plugin_routes import add_plugin_routes, describe_plugin_routes
from srv.server.protocols.admin import Admin
from srv.server.protocols.chat import Chat
from srv.server.protocols.completions import Completions
from srv.server.protocols.embeddings import Embeddings
from srv.server.protocols.native import NativeGenerate
from srv.server.protocols.native_fields import AbortBody, DetokenizeBody, GenerateBody, TokenizeBody
from srv.server.protocols.openai_fields import ChatBody, CompletionBody, EmbeddingBody
from srv.server.service import Service
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor

__all__ = ["REQUEST_BODIES", "ServerSettings", "create_app"]

REQUEST_BODIES: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
}

Handler = Callable[[Request], Awaitable[Response]]


def create_app(settings: ServerSettings, client: EngineClient, text: TextProcessor, hooks: Hooks = NO_HOOKS) -> FastAPI:
    """The app for one engine. `app.state.lifecycle` drains it; `app.state.service` holds its components, and the
    caller closes `app.state.service.preprocessor`. Raises PluginError if a route of a plugin cannot be added."""
    service = Service(settings, client, text, hooks)

    app = FastAPI(title="srv", version=srv.__version__, redirect_slashes=False)
    app.state.service, app.state.lifecycle = service, service.lifecycle
    failures.install(app, service.observers.refused)
    _add_routes(app, service)
    app.add_middleware(
        AuthMiddleware, key=settings.api_key, responded=service.metrics.responded, busy=lambda: client.waiting > 0
    )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    chat = Chat(service)
    admin = Admin(service, chat)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", Completions(service).__call__),
        ("POST", "/v1/chat/completions", chat.__call__),
        ("POST", "/v1/embeddings", Embeddings(service).__call__),
        ("GET", "/v1/models", admin.models),
        ("GET", "/v1/models/{model:path}", admin.model),
        ("POST", "/generate", NativeGenerate(service).__call__),
        ("POST", "/tokenize", admin.tokenize),
        ("POST", "/detokenize", admin.detokenize),
        ("POST", "/abort_request", admin.abort),
        ("GET", "/health", admin.health),
        ("GET", "/health_generate", admin.health_generate),
        ("GET", "/get_model_info", admin.model_info),
        ("GET", "/get_server_info", admin.server_info),
        ("GET POST", "/flush_cache", admin.flush_cache),
        ("GET", "/metrics", admin.metrics),
    ]
    for methods, path, handler in routes:
        # A plain Starlette route, because the handlers read and validate bodies themselves.
        app.add_route(path, handler, methods=methods.split(), name=path)
    more = add_plugin_routes(app, service.observers.hooks)
    app.openapi = lambda: describe_plugin_routes(_openapi(routes), more)  # type: ignore[method-assign]


def _openapi(routes: list[tuple[str, str, Handler]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document, generated from the schemas that validate the bodies."""
    schemas: list[tuple[type[RequestBody], JsonSchemaMode]] = [(body, "validation") for body in REQUEST_BODIES.values()]
    references, definitions = models_json_schema(schemas, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for methods, path, _ in routes:
        operation: dict[str, Any] = {"responses": {"200": {"description": "Success"}}}
        if (body := REQUEST_BODIES.get(path)) is not None:
            content = {"application/json": {"schema": references[(body, "validation")]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[path.replace(":path", "")] = {method.lower(): operation for method in methods.split()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "srv", "version": srv.__version__},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
