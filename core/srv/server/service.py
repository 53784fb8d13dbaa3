"""What every endpoint is given: settings, engine, text, intake, metrics, lifecycle. Nothing is global.

Owns how works become a running group. Must not know the shape of any protocol.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from functools import partial

from starlette.requests import Request

from srv.server.body import read_json
from srv.server.client import EngineClient
from srv.server.generation import Group, Sequence
from srv.server.intake import Intake, Work
from srv.server.lifecycle import Lifecycle, Ticket
from srv.server.metrics import Metrics
from srv.server.settings import ServerSettings
from srv.server.text import TextProcessor


class Service:
    """The parts of one API process."""

    def __init__(self, settings: ServerSettings, client: EngineClient, text: TextProcessor) -> None:
        self.settings, self.client, self.text = settings, client, text
        self.intake = Intake(settings, text)
        self.metrics = Metrics(settings.model_name)
        self.lifecycle = Lifecycle(client)
        self._limits = settings.body_limits

    async def body(self, request: Request) -> object:
        return await read_json(request, self._limits)

    def start(self, works: Sequence_[Work], rids: Sequence_[str], arrival: float) -> tuple[Ticket, Group]:
        """Admit a client request under one id, or one id a prompt.

        The caller closes the ticket when the response has ended. Raises RequestError or EngineDead.
        """
        counts = [len(work.seeds) for work in works]
        if len(rids) == 1:
            counts = [sum(counts)]
        ticket = self.lifecycle.admit(list(zip(rids, counts, strict=True)))
        try:
            return ticket, Group(self._sequences(works, ticket, arrival))
        except BaseException:
            ticket.close()
            raise

    def _sequences(self, works: Sequence_[Work], ticket: Ticket, arrival: float) -> list[Sequence]:
        names = ticket.sequences
        places = [(prompt, output) for prompt, work in enumerate(works) for output in range(len(work.seeds))]
        return [
            Sequence(
                self.client,
                self.text,
                self.metrics,
                works[prompt_index],
                name=names[index],
                index=index,
                prompt_index=prompt_index,
                output_index=output_index,
                arrival=arrival,
                aborted=partial(ticket.is_aborted, names[index]),
            )
            for index, (prompt_index, output_index) in enumerate(places)
        ]
