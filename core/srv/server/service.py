"""The components that all endpoints share: settings, engine client, text processor, preprocessor, metrics, lifecycle.

Owns how tokenized prompts become a running request group, or embeddings. Must not know the format of any protocol.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from functools import partial

from starlette.requests import Request

from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.client import EngineClient
from srv.server.embedding import Embedding, embed
from srv.server.generation import RequestGroup, Sequence
from srv.server.http.body import read_json
from srv.server.lifecycle import Lifecycle, Ticket
from srv.server.metrics import Metrics
from srv.server.observers import Observers
from srv.server.preprocessor import RequestPreprocessor, TokenizedPrompt
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor
from srv.types import PoolingParams, RequestSpec


class Service:
    """The components of one API process."""

    def __init__(
        self, settings: ServerSettings, client: EngineClient, text: TextProcessor, hooks: Hooks = NO_HOOKS
    ) -> None:
        self.settings, self.client, self.text = settings, client, text
        self.observers = Observers(hooks)
        self.preprocessor = RequestPreprocessor(settings, text)
        self.metrics = Metrics(settings.model_name)
        self.lifecycle = Lifecycle(client)
        self._limits = settings.body_limits

    async def body(self, request: Request) -> object:
        return await read_json(request, self._limits)

    def start(
        self, prompts: Sequence_[TokenizedPrompt], rids: Sequence_[str], arrival: float, batch: str | None = None
    ) -> tuple[Ticket, RequestGroup]:
        """Admit a client request with one id, or one id per prompt and possibly another one for all of them.

        The caller must close the ticket when the response has ended. Raises RequestError or EngineDead.
        """
        counts = [len(prompt.seeds) for prompt in prompts]
        if len(rids) == 1:
            counts = [sum(counts)]
        ticket = self.lifecycle.admit(list(zip(rids, counts, strict=True)), batch)
        try:
            return ticket, RequestGroup(self._sequences(prompts, ticket, arrival))
        except BaseException:
            ticket.close()
            raise

    async def embed(
        self, prompts: Sequence_[list[int]], params: PoolingParams, rid: str, arrival: float
    ) -> list[Embedding]:
        """Admit a client request and compute the embedding of each prompt. Cancellation aborts it at the engine.

        Raises RequestError, also if the request was aborted, or EngineDead.
        """
        ticket = self.lifecycle.admit([(rid, len(prompts))])
        try:
            specs = [
                RequestSpec(id=name, tokens=tuple(tokens), params=params)
                for name, tokens in zip(ticket.sequences, prompts, strict=True)
            ]
            embeddings = await embed(
                self.client, self.metrics, self.observers, specs, arrival=arrival, aborted=ticket.is_aborted
            )
        finally:
            ticket.close()
        self.lifecycle.check_complete([embedding.finish for embedding in embeddings])
        return embeddings

    def _sequences(self, prompts: Sequence_[TokenizedPrompt], ticket: Ticket, arrival: float) -> list[Sequence]:
        names = ticket.sequences
        positions = [(index, output) for index, prompt in enumerate(prompts) for output in range(len(prompt.seeds))]
        return [
            Sequence(
                self.client,
                self.text,
                self.metrics,
                self.observers,
                prompts[prompt_index],
                name=names[index],
                index=index,
                prompt_index=prompt_index,
                output_index=output_index,
                arrival=arrival,
                aborted=partial(ticket.is_aborted, names[index]),
            )
            for index, (prompt_index, output_index) in enumerate(positions)
        ]
