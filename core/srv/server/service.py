"""The components that all endpoints share: settings, engine client, text processor, preprocessor, metrics, lifecycle.

Owns how tokenized prompts become a running request group, or embeddings. Must not know the format of any protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Sequence_
from functools import partial

from starlette.requests import Request

from srv.io.messages import Stats
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.client import EngineClient
from srv.server.embedding import Embedding, embed
from srv.server.generation import RequestGroup, Sequence
from srv.server.http.access import NOBODY, Caller
from srv.server.http.body import HeldBodies, HeldShare, read_json
from srv.server.lifecycle import Lifecycle, Ticket
from srv.server.observe.device_reader import DeviceReader
from srv.server.observe.metrics import Metrics
from srv.server.observe.observers import Observers
from srv.server.observe.request_log import request_log
from srv.server.request.grammars import Grammars
from srv.server.request.preprocessor import RequestPreprocessor
from srv.server.request.prompt_request import TokenizedPrompt
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor
from srv.types import Pooling, PoolingParams, RequestSpec


class Service:
    """The components of one API process."""

    def __init__(
        self, settings: ServerSettings, client: EngineClient, text: TextProcessor, hooks: Hooks = NO_HOOKS
    ) -> None:
        self.settings, self.client, self.text = settings, client, text
        self.observers = Observers(hooks, request_log(settings.observe, text, settings.access.secrets))
        self.preprocessor = RequestPreprocessor(
            settings, text, Grammars(settings.grammars, text, client.send_vocabulary)
        )
        self.metrics = Metrics(
            settings.model_name,
            settings.slow_paths,
            settings.memory,
            settings.startup,
            settings.observe,
            settings.pool,
            settings.request_token_limit,
        )
        self.metrics.registry.register(self.preprocessor.counts)
        self.devices = DeviceReader(settings.sensors)
        self.lifecycle = Lifecycle(client)
        self._limits = settings.body_limits
        self.bodies = HeldBodies(settings.max_held_request_bytes)

    async def body(self, request: Request) -> object:
        share: HeldShare = request.scope["srv.body"]
        return await read_json(request, self._limits, share)

    async def optional_body(self, request: Request) -> object:
        """The body, or {} if the client sends none."""
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return {}
        return await self.body(request)

    async def stats(self, seconds: float) -> Stats | None:
        """Current statistics, or after this time the last ones, if there are any. Raises EngineDead."""
        try:
            async with asyncio.timeout(seconds):
                return await self.client.stats()
        except TimeoutError:
            return self.client.latest_stats

    def start(
        self,
        prompts: Sequence_[TokenizedPrompt],
        rids: Sequence_[str],
        arrival: float,
        batch: str | None = None,
        caller: Caller = NOBODY,
    ) -> tuple[Ticket, RequestGroup]:
        """Admit a client request with one id, or one id per prompt and possibly another one for all of them.

        caller: whoever sent it, for its ids, fair shares (`RequestSpec.owner`) and the namespace of the prefix cache.
        The caller must close the ticket when the response has ended. Raises RequestError or EngineDead.
        """
        counts = [len(prompt.seeds) for prompt in prompts]
        if len(rids) == 1:
            counts = [sum(counts)]
        ticket = self.lifecycle.admit(list(zip(rids, counts, strict=True)), batch, caller.owner)
        try:
            return ticket, RequestGroup(
                self._sequences(prompts, ticket, arrival, caller),
                self.settings.stream_interval,
                self.settings.cache_report,
            )
        except BaseException:
            ticket.close()
            raise

    async def embed(
        self,
        prompts: Sequence_[list[int]],
        params: PoolingParams | Sequence_[PoolingParams],
        rid: str,
        arrival: float,
        caller: Caller = NOBODY,
        namespace: str = "",
    ) -> list[Embedding]:
        """Admit a client request and compute what `params` say of each prompt. Cancellation aborts it at the engine.

        params: of all prompts, or of each. Raises RequestError, also if the request was aborted, or EngineDead.
        """
        all_params = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        ticket = self.lifecycle.admit([(rid, len(prompts))], owner=caller.owner)
        try:
            specs = [
                RequestSpec(
                    id=name,
                    tokens=tuple(tokens),
                    params=pooling,
                    namespace=caller.cache + namespace,
                    group=ticket.sequences[0],
                    owner=caller.share,
                )
                for name, tokens, pooling in zip(ticket.sequences, prompts, all_params, strict=True)
            ]
            embeddings = await embed(
                self.client, self.metrics, self.observers, specs, arrival=arrival, aborted=ticket.is_aborted
            )
        finally:
            ticket.close()
        self.lifecycle.check_complete([embedding.finish for embedding in embeddings])
        return embeddings

    async def pool_one(self, tokens: list[int], rid: str) -> None:
        """Have the engine pool a prompt, and nothing else. Raises like `embed`."""
        params = PoolingParams(pooling=self.settings.pooling or Pooling.LAST)
        await self.embed([tokens], params, rid, time.perf_counter())

    def _sequences(
        self, prompts: Sequence_[TokenizedPrompt], ticket: Ticket, arrival: float, caller: Caller
    ) -> list[Sequence]:
        names = ticket.sequences
        positions = [(index, output) for index, prompt in enumerate(prompts) for output in range(len(prompt.seeds))]
        sequences: list[Sequence] = []
        for index, (prompt_index, output_index) in enumerate(positions):
            prompt = prompts[prompt_index]
            follows = output_index > 0 and prompt.params.prompt_logprobs is not None
            sequences.append(
                Sequence(
                    self.client,
                    self.text,
                    self.metrics,
                    self.observers,
                    prompt,
                    name=names[index],
                    group=names[0],
                    owner=caller.share,
                    cache=caller.cache,
                    index=index,
                    prompt_index=prompt_index,
                    output_index=output_index,
                    arrival=arrival,
                    aborted=partial(ticket.is_aborted, names[index]),
                    leader=sequences[index - output_index] if follows else None,
                )
            )
        return sequences
