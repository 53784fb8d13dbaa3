"""The HTTP application and its routes.

A launcher needs only `create_app`. The caller runs `client.run()` as a task of the same event loop, and on SIGTERM
awaits `app.state.lifecycle.drain(seconds)` before it stops the HTTP server.
"""

from __future__ import annotations

import threading

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

import srv
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.batches.files import FileStore
from srv.server.batches.runner import BatchRunner
from srv.server.batches.sender import LineSender
from srv.server.client import EngineClient
from srv.server.http import failures
from srv.server.http.access_log import AccessLog
from srv.server.http.auth import AuthMiddleware
from srv.server.http.key_rates import KeyRates
from srv.server.http.key_uses import KeyUses
from srv.server.http.observing import add_observing
from srv.server.http.request_ids import RequestIds
from srv.server.http.root_path import RootPath
from srv.server.observe.crash_dump import CrashRecorder
from srv.server.observe.tracing import Tracer
from srv.server.protocols.anthropic.fields import CountTokensBody, MessagesBody
from srv.server.protocols.anthropic.messages import CountTokens, Messages
from srv.server.protocols.native.fields import AbortBody, GenerateBody
from srv.server.protocols.native.generate import NativeGenerate
from srv.server.protocols.openai.batches import BATCH_ENDPOINTS, BatchBody, Batches
from srv.server.protocols.openai.chat import Chat
from srv.server.protocols.openai.completions import Completions
from srv.server.protocols.openai.fields import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from srv.server.protocols.openai.files import Files
from srv.server.protocols.openapi import Endpoint, openapi_document
from srv.server.protocols.operators.admin import Admin
from srv.server.protocols.operators.expert_usage import ExpertUsageRecord
from srv.server.protocols.operators.operation import LogLevelBody, Operation, PauseBody
from srv.server.protocols.operators.page import Page
from srv.server.protocols.operators.profiling import Profiling, StartProfileBody
from srv.server.protocols.plugin_routes import add_plugin_routes, describe_plugin_routes
from srv.server.protocols.pooled.embeddings import Embeddings
from srv.server.protocols.pooled.fields import ClassifyBody, RerankBody, ScoreBody
from srv.server.protocols.pooled.scores import Classify, Rerank, Score
from srv.server.protocols.responses.fields import ResponsesBody
from srv.server.protocols.responses.responses import Responses
from srv.server.request.fields import RequestBody
from srv.server.service import Service
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor

__all__ = ["REQUEST_BODIES", "ServerSettings", "create_app"]


REQUEST_BODIES: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
    "/v1/classify": ClassifyBody,
    "/classify": ClassifyBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/start_profile": StartProfileBody,
    "/pause_generation": PauseBody,
    "/continue_generation": PauseBody,
    "/set_log_level": LogLevelBody,
    "/v1/batches": BatchBody,
}


def create_app(
    settings: ServerSettings,
    client: EngineClient,
    text: TextProcessor,
    hooks: Hooks = NO_HOOKS,
    tracer: Tracer | None = None,
    recorder: CrashRecorder | None = None,
) -> FastAPI:
    """The app for one engine. `app.state.lifecycle` drains it; `app.state.service` holds its components, and the
    caller closes `app.state.service.preprocessor`. Raises PluginError if a route of a plugin cannot be added.

    tracer: exports the traces of requests. recorder: keeps requests for a crash dump. The caller closes both.
    """
    service = Service(settings, client, text, hooks)

    app = FastAPI(title="srv", version=srv.__version__, redirect_slashes=False)
    app.state.service, app.state.lifecycle = service, service.lifecycle
    failures.install(app, service.observers.refused)
    uses = KeyUses(settings.access.clients)
    _add_routes(app, service, uses)
    add_observing(app, settings.observe, tracer, recorder)
    if settings.access.clients:
        app.add_middleware(KeyRates, uses=uses)
    app.add_middleware(
        AuthMiddleware,
        access=settings.access,
        bodies=service.bodies,
        responded=service.metrics.responded,
        busy=lambda: client.waiting > 0,
    )
    if settings.access_log or settings.observe.log_level_http in ("debug", "info"):
        app.add_middleware(AccessLog)
    if settings.root_path:
        app.add_middleware(RootPath, prefix=settings.root_path)
    app.add_middleware(RequestIds)
    return app


async def _found(request: Request) -> Response:
    return Response()


def _endpoints(service: Service, uses: KeyUses) -> list[Endpoint]:
    chat = Chat(service)
    admin = Admin(service)
    responses = Responses(service)
    profiling = Profiling(service)
    operation = Operation(service)
    experts = ExpertUsageRecord(service)
    completions, embeddings = Completions(service), Embeddings(service)
    rerank, score, classify = Rerank(service), Score(service), Classify(service)
    endpoints = [
        Endpoint("POST", "/v1/completions", completions.__call__, "Complete a prompt (OpenAI)."),
        Endpoint("POST", "/v1/chat/completions", chat.__call__, "Continue a conversation (OpenAI)."),
        Endpoint("POST", "/v1/embeddings", embeddings.__call__, "Embed prompts (OpenAI)."),
        Endpoint("POST", "/v1/rerank", rerank.__call__, "Order documents by relevance (Jina, Cohere)."),
        Endpoint("POST", "/rerank", rerank.__call__, "Like /v1/rerank."),
        Endpoint("POST", "/v2/rerank", rerank.__call__, "Like /v1/rerank (Cohere's second version)."),
        Endpoint("POST", "/v1/score", score.__call__, "Score pairs of texts (vLLM)."),
        Endpoint("POST", "/score", score.__call__, "Like /v1/score."),
        Endpoint("POST", "/v1/classify", classify.__call__, "Classify texts (vLLM)."),
        Endpoint("POST", "/classify", classify.__call__, "Like /v1/classify."),
        Endpoint("POST", "/v1/responses", responses.__call__, "Continue a conversation (OpenAI's Responses)."),
        Endpoint("POST", "/v1/responses/input_tokens", responses.input_tokens, "The length of a prompt (OpenAI)."),
        Endpoint("GET", "/v1/responses/{response}", responses.read, "A stored response."),
        Endpoint("DELETE", "/v1/responses/{response}", responses.delete, "Forget a stored response."),
        Endpoint("GET", "/v1/responses/{response}/input_items", responses.input_items, "Its conversation."),
        Endpoint("POST", "/v1/responses/{response}/cancel", responses.cancel, "Says why it cannot be cancelled."),
        Endpoint("POST", "/v1/messages", Messages(service).__call__, "Continue a conversation (Anthropic)."),
        Endpoint(
            "POST", "/v1/messages/count_tokens", CountTokens(service).__call__, "The length of a prompt (Anthropic)."
        ),
        Endpoint("GET", "/v1/models", admin.models, "The served model, as a list (OpenAI)."),
        Endpoint("GET", "/v1/models/{model:path}", admin.model, "One model (OpenAI)."),
        Endpoint("POST", "/generate", NativeGenerate(service).__call__, "Complete prompts (SGLang)."),
        Endpoint("POST", "/tokenize", admin.tokenize, "The token ids of a text or a conversation."),
        Endpoint("POST", "/detokenize", admin.detokenize, "The text of token ids."),
        Endpoint("POST", "/abort_request", admin.abort, "Abort requests."),
        Endpoint("GET", "/health", admin.health, "Whether the server accepts requests."),
        Endpoint("GET", "/ping", admin.health, "Like /health."),
        Endpoint("GET", "/version", admin.version, "The version of the server."),
        Endpoint("GET", "/health_generate", admin.health_generate, "Whether the engine generates a token."),
        Endpoint("GET", "/get_model_info", admin.model_info, "The served model."),
        Endpoint("GET", "/get_server_info", admin.server_info, "Arguments, backends and statistics."),
        Endpoint("POST", "/flush_cache", admin.flush_cache, "Clear the prefix cache."),
        Endpoint("POST", "/start_profile", profiling.start, "Record what the engine computes."),
        Endpoint("POST", "/stop_profile", profiling.stop, "Stop recording, and write the traces."),
        Endpoint(
            "POST", "/start_expert_distribution_record", experts.start, "Count the tokens that experts get (SGLang)."
        ),
        Endpoint("POST", "/stop_expert_distribution_record", experts.stop, "Count no more."),
        Endpoint("POST", "/dump_expert_distribution_record", experts.dump, "Read the counts, and forget them."),
        Endpoint("GET", "/server_info", admin.server_info, "Like /get_server_info."),
        Endpoint("GET", "/model_info", admin.model_info, "Like /get_model_info."),
        Endpoint("GET", "/get_load", operation.load, "Requests and tokens in the engine (SGLang)."),
        Endpoint("GET", "/load", operation.server_load, "Requests without a complete response (vLLM)."),
        Endpoint("POST", "/pause_generation", operation.pause, "Plan no further steps; no request is lost."),
        Endpoint("POST", "/continue_generation", operation.resume, "Go on after /pause_generation."),
        Endpoint("POST", "/set_log_level", operation.set_log_level, "Change what the server and the engine log."),
        Endpoint("GET", "/log_level", operation.log_level, "The minimum severity that is logged."),
        Endpoint("GET", "/metrics", admin.metrics, "Metrics in the format of Prometheus.", returns="text/plain"),
    ]
    handlers = (completions.__call__, chat.__call__, embeddings.__call__, responses.__call__)
    sender = LineSender(dict(zip(BATCH_ENDPOINTS, handlers, strict=True)), service.bodies)
    endpoints += _batch_endpoints(service, sender, uses)
    if service.settings.ui:
        page = Page(service)
        endpoints += [
            Endpoint("GET", "/", page.index, "A page for a browser.", returns="text/html"),
            Endpoint("GET", "/ui/app.js", page.script, "Its script.", returns="text/javascript"),
            Endpoint("GET", "/ui/style.css", page.style, "Its style.", returns="text/css"),
            Endpoint("GET", "/ui/state", page.state, "What it shows of load and machine."),
        ]
    return endpoints


def _batch_endpoints(service: Service, sender: LineSender, uses: KeyUses) -> list[Endpoint]:
    store = FileStore(service.settings.file_storage_path, shared=bool(service.settings.access.clients))
    threading.Thread(target=store.load, name="srv-files", daemon=True).start()  # thousands of files take a while
    runner = BatchRunner(store, sender, service.settings.body_limits, service.lifecycle, uses)
    files, batches = Files(service, store), Batches(service, store, runner)
    return [
        Endpoint("POST", "/v1/files", files.upload, "Upload a file for a batch, as a form (OpenAI)."),
        Endpoint("GET", "/v1/files", files.list, "The caller's files."),
        Endpoint("GET", "/v1/files/{file}", files.read, "One file."),
        Endpoint("GET", "/v1/files/{file}/content", files.content, "Its content.", returns="application/octet-stream"),
        Endpoint("DELETE", "/v1/files/{file}", files.delete, "Delete a file."),
        Endpoint("POST", "/v1/batches", batches.create, "Serve the requests of a file (OpenAI)."),
        Endpoint("GET", "/v1/batches", batches.list, "The caller's batches."),
        Endpoint("GET", "/v1/batches/{batch}", batches.read, "One batch."),
        Endpoint("POST", "/v1/batches/{batch}/cancel", batches.cancel, "End a batch early."),
    ]


def _add_routes(app: FastAPI, service: Service, uses: KeyUses) -> None:
    routes = _endpoints(service, uses)
    for route in routes:
        # A plain Starlette route, because the handlers read and validate bodies themselves.
        app.add_route(route.path, route.handler, methods=[route.method], name=route.path)
    app.add_route("/", _found, methods=["HEAD"], name="HEAD /")  # clients of Anthropic ask whether somebody answers
    plugin_endpoints = add_plugin_routes(app, service.observers.hooks)
    root, bodies = service.settings.root_path, REQUEST_BODIES
    app.openapi = lambda: describe_plugin_routes(openapi_document(routes, bodies, root), plugin_endpoints)  # type: ignore[method-assign]
