"""Endpoints besides generation: models, tokenization, health, information, cache, metrics, abort.

Must not know how sequences are generated.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import srv
from srv.commands import Answer, Command, ExpertLoad, ReadExpertLoad, ReadMemory
from srv.errors import EngineDead, RequestError
from srv.io.messages import Stats
from srv.reply.tools import ToolUse
from srv.server.http.auth import owner_of
from srv.server.http.events import while_connected
from srv.server.http.json_response import json_response
from srv.server.observe.ledgers import memory_report, startup_report
from srv.server.protocols.common.conversations import render
from srv.server.protocols.native.fields import AbortBody
from srv.server.protocols.openai.chat import read_conversation
from srv.server.protocols.openai.fields import DetokenizeBody, TokenizeBody
from srv.server.request.neutral import is_neutral
from srv.server.request.prompts import read_prompts
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service

STATS_SECONDS = 1.0  # how long a scrape waits for an engine in a long step; then it returns the last report


class Admin:
    """The endpoints, one method each."""

    def __init__(self, service: Service) -> None:
        self.service = service

    # ---- models -----------------------------------------------------------------------------------------

    def _model(self) -> dict[str, object]:
        settings = self.service.settings
        return {
            "id": settings.model_name,
            "object": "model",
            "created": settings.created,
            "owned_by": "srv",
            "root": settings.model_name,
            "parent": None,
            "max_model_len": settings.request_token_limit,
            # Anthropic's clients read the card by these.
            "type": "model",
            "display_name": settings.model_name,
            "created_at": datetime.fromtimestamp(settings.created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": settings.request_token_limit,
            "lifecycle": "active",
        }

    async def models(self, request: Request) -> Response:
        card = self._model()
        pages = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}  # of Anthropic's list
        return json_response({"object": "list", "data": [card], **pages})

    async def model(self, request: Request) -> Response:
        if not request.path_params["model"]:  # the list's path with a slash at its end
            return await self.models(request)
        self.service.preprocessor.check_model(request.path_params["model"])
        return json_response(self._model())

    async def model_info(self, request: Request) -> Response:
        settings = self.service.settings
        return json_response(
            {
                **settings.model_info,
                "max_request_tokens": settings.request_token_limit,
                "hidden_size": settings.hidden_size,
                "is_embedding": settings.pooling is not None,
                "pooling": settings.pooling,
                "generates": settings.generates,
                "labels": list(settings.head.labels),
            }
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": srv.__version__})

    async def server_info(self, request: Request) -> Response:
        settings = self.service.settings
        stats, peaks = await asyncio.gather(self._stats(), self._peaks())
        return json_response(
            {
                **settings.server_info,
                "memory": memory_report(settings.memory, peaks),
                "startup": startup_report(settings.startup()),
                "engine": None if stats is None else msgspec.structs.asdict(stats),
                "hooks": self.service.observers.hooks.status(),
                "draining": self.service.lifecycle.draining,
            }
        )

    # ---- text -------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = TokenizeBody.parse(await self.service.body(request))
        preprocessor = self.service.preprocessor
        preprocessor.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", code="invalid_value", param="prompt")
        batch = False
        if body.messages is not None:
            use = ToolUse(tuple(tool.tool(f"tools[{index}]") for index, tool in enumerate(body.tools or ())))
            limit = self.service.settings.context_length
            conversation = read_conversation(body, body.chat_template_kwargs or {}, use, limit)
            texts = [await render(preprocessor, conversation)]
        else:
            texts, batch = self._texts(body)
        special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        tokens = await preprocessor.encode(texts, special, "prompt")
        response: dict[str, object] = {
            "tokens": tokens if batch else tokens[0],
            "count": [len(ids) for ids in tokens] if batch else len(tokens[0]),
            "max_model_len": self.service.settings.request_token_limit,
        }
        if body.return_token_strs:
            texts_by_token = await preprocessor.token_texts(tokens)
            response["token_strs"] = texts_by_token if batch else texts_by_token[0]
        return json_response(response)

    def _texts(self, body: TokenizeBody) -> tuple[list[str], bool]:
        for param in (
            "add_generation_prompt",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "tools",
        ):
            if not is_neutral(param, getattr(body, param)):
                raise RequestError(
                    f"{param} is refused: it needs messages instead of prompt", code="invalid_value", param=param
                )
        prompts, batch = read_prompts(body.prompt, "prompt")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) != len(prompts):
            raise RequestError("prompt must contain texts", code="invalid_type", param="prompt")
        self.service.preprocessor.check_count(len(texts), 1, "prompt")
        return texts, batch

    async def detokenize(self, request: Request) -> Response:
        body = DetokenizeBody.parse(await self.service.body(request))
        preprocessor = self.service.preprocessor
        preprocessor.check_model(body.model)
        if body.tokens == []:
            return json_response({"text": ""})
        prompts, batch = read_prompts(body.tokens, "tokens")
        sequences: list[list[int]] = []
        for tokens in prompts:
            if isinstance(tokens, str):
                raise RequestError("tokens must contain token ids", code="invalid_type", param="tokens")
            preprocessor.check_tokens(tokens, "tokens")
            sequences.append(tokens)
        texts = await preprocessor.decode(sequences, body.skip_special_tokens is not False)
        return json_response({"text": texts if batch else texts[0]})

    # ---- health -----------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        if self.service.lifecycle.healthy:
            stats = self.service.client.latest_stats
            details: dict[str, object] = {"paused": True} if stats is not None and stats.paused else {}
            if "details" in request.query_params:
                details = await self._details()
            inert = {"inert_features": list(stats.inert)} if stats is not None and stats.inert else {}
            return json_response({"status": "ok", **inert, **details})
        alive, hung = self.service.client.alive, self.service.lifecycle.hung
        status = "engine dead" if not alive else "engine hung" if hung else "shutting down"
        return json_response({"status": status}, 503)

    async def _details(self) -> dict[str, object]:
        """What an operator asks first of a server that answers slowly."""
        stats = await self._stats()
        if stats is None:
            return {}
        return {
            "paused": stats.paused,
            "requests": self.service.lifecycle.active,
            "running": stats.running,
            "waiting": stats.waiting,
            "pages": {"total": stats.pages_total, "free": stats.pages_free, "cached": stats.pages_cached},
            "model": self.service.settings.model_name,
            "version": srv.__version__,
            "uptime_seconds": round(max(0.0, time.time() - self.service.settings.created), 1),
        }

    async def health_generate(self, request: Request) -> Response:
        """Generates one token, or pools one if the model generates none."""
        self.service.lifecycle.check_accepting()
        seconds = self.service.settings.health_generate_seconds
        if not self.service.settings.generates:
            return await self._health_pool(request, seconds)
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
        tokenized_prompt = await self.service.preprocessor.prepare([0], sampling, param="prompt", default_max_tokens=1)
        ticket, group = self.service.start([tokenized_prompt], [f"health-{uuid.uuid4().hex}"], time.perf_counter())
        try:
            async with asyncio.timeout(seconds):
                await while_connected(request.receive, group.gather())
        except TimeoutError:
            raise RequestError(
                f"the engine generated no token within {seconds:g} seconds", code="engine_slow", status=503
            ) from None
        finally:
            ticket.close()
        return json_response({"status": "ok"})

    async def _health_pool(self, request: Request, seconds: float) -> Response:
        try:
            async with asyncio.timeout(seconds):
                await while_connected(request.receive, self.service.pool_one([0], f"health-{uuid.uuid4().hex}"))
        except TimeoutError:
            raise RequestError(
                f"the engine pooled no prompt within {seconds:g} seconds", code="engine_slow", status=503
            ) from None
        return json_response({"status": "ok"})

    # ---- control ----------------------------------------------------------------------------------------

    async def abort(self, request: Request) -> Response:
        body = AbortBody.parse(await self.service.body(request))
        if bool(body.abort_all) == (body.rid is not None):
            raise RequestError("send either rid or abort_all = true", code="invalid_value", param="rid")
        access = self.service.settings.access
        if body.abort_all and access.several_clients:
            raise access.shared_refusal("abort_all = true")
        owner = owner_of(request) if access.several_clients else None  # else an operator, or the only client
        rids = None if body.abort_all else _rids(body.rid)
        return json_response({"aborted": self.service.lifecycle.abort(rids, owner)})

    async def flush_cache(self, request: Request) -> Response:
        flushed = await self.service.client.flush()
        if not flushed.done:
            raise RequestError(
                f"the prefix cache is not flushed: {flushed.reason}; retry when no requests are running",
                code="cache_in_use",
            )
        return json_response({"flushed": True})

    async def metrics(self, request: Request) -> Response:
        if not self.service.metrics.enabled:
            raise RequestError(
                "this server has no metrics: it was started with --no-enable-metrics",
                code="metrics_disabled",
                status=404,
            )
        stats, devices, experts = await asyncio.gather(
            self._stats(), self.service.devices.devices(), self._expert_load()
        )
        text = self.service.metrics.expose(stats, self.service.client.alive, devices, experts)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _peaks(self) -> Sequence[int | None]:
        """What the steps of each rank have needed at most; () if no rank knows, or the engine is busy or gone.

        The engine answers between steps, so that asking costs the overlap of one.
        """
        if not self.service.settings.counts_peak:
            return ()
        return [answer.peak_bytes for answer in await self._asked(ReadMemory())]

    async def _expert_load(self) -> ExpertLoad | None:
        """None if it is not measured, or the engine is busy or gone. Ranks choose alike: the first one's load."""
        if not self.service.settings.measures_experts:
            return None
        return next((answer.expert_load for answer in await self._asked(ReadExpertLoad())), None)

    async def _asked(self, command: Command) -> Sequence[Answer]:
        """What the ranks answer; () if the engine is busy or gone."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await self.service.client.control(command)
        except (TimeoutError, EngineDead):
            return ()

    async def _stats(self) -> Stats | None:
        """Current statistics, or the last ones of an engine that is busy or gone."""
        try:
            return await self.service.stats(STATS_SECONDS)
        except EngineDead:
            return self.service.client.latest_stats


def _rids(rid: object) -> Sequence[str]:
    ids = [rid] if isinstance(rid, str) else rid
    if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
        raise RequestError("rid must be a string or an array of strings", code="invalid_type", param="rid")
    return ids
