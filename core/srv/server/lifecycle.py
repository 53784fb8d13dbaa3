"""Which client requests are live, under which names, and whether new ones are taken.

Owns request ids (`rid`) and graceful shutdown. Must not know protocols or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from srv.errors import RequestError
from srv.server.client import EngineClient
from srv.types import FinishReason

CUT = "the server is shutting down; the output is cut"
LAST_WORDS_SECONDS = 2.0  # after the engine has drained: for responses to reach their clients


class Ticket:
    """One live HTTP request: the ids of its sequences at the engine, by request id. Close it exactly once."""

    def __init__(self, lifecycle: Lifecycle, named: dict[str, tuple[str, ...]]) -> None:
        self.named = named
        self._lifecycle = lifecycle

    def is_aborted(self, sequence: str) -> bool:
        """Whether this sequence was aborted; one that has not been sent to the engine yet must not be."""
        return sequence in self._lifecycle.aborted

    @property
    def sequences(self) -> list[str]:
        return [sequence for sequences in self.named.values() for sequence in sequences]

    def close(self) -> None:
        self._lifecycle._close(self)


class Lifecycle:
    """Admits client requests while the server accepts them.

    Shutdown: `begin_drain()` refuses new requests with a 503; `await drain(seconds)` does that too, lets
    running ones finish, has the engine abort what is left, and returns when the last response has ended.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._live: dict[str, tuple[str, ...]] = {}  # request id -> ids of its sequences at the engine
        self._serial = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.aborted: set[str] = set()  # sequences of live requests that were aborted here

    @property
    def active(self) -> int:
        """Request ids whose responses have not ended."""
        return len(self._live)

    @property
    def healthy(self) -> bool:
        return self._client.alive and not self.draining

    def check_accepting(self) -> None:
        """Raises RequestError (503) while shutting down, EngineDead when there is no engine."""
        if self.draining:
            raise RequestError(
                "the server is shutting down and takes no new requests; try again later or elsewhere",
                code="shutting_down",
                status=503,
            )
        self._client.check_alive()

    def check_not_cut(self, finishes: Iterable[FinishReason]) -> None:
        """Raises RequestError (503) if a shutdown has cut an output: OpenAI's protocol has no other word for it."""
        if self.draining and FinishReason.ABORT in finishes:
            raise RequestError(CUT, code="shutting_down", status=503)

    def admit(self, wanted: Sequence[tuple[str, int]]) -> Ticket:
        """Take in request ids, each with its number of sequences, in order.

        Raises RequestError if the server is draining, or if an id is taken, by a live request or twice here.
        """
        self.check_accepting()
        named: dict[str, tuple[str, ...]] = {}
        for rid, sequences in wanted:
            if rid in self._live or rid in named:
                why = "it is given twice" if rid in named else "a request of this id is running"
                raise RequestError(
                    f"rid = {rid!r} is refused: {why}; choose another",
                    code="duplicate_request",
                    param="rid",
                    status=409,
                )
            # The serial keeps engine ids unique even when a client uses an id again while the engine still
            # aborts its last use.
            self._serial += 1
            named[rid] = tuple(f"{rid}.{self._serial}.{index}" for index in range(sequences))
        self._live |= named
        self._idle.clear()
        return Ticket(self, named)

    def _close(self, ticket: Ticket) -> None:
        for rid in ticket.named:
            self._live.pop(rid, None)
        self.aborted.difference_update(ticket.sequences)
        if not self._live:
            self._idle.set()

    def abort(self, rids: Sequence[str] | None) -> int:
        """Abort these client requests (None: all) and say how many there were. Raises RequestError: 404."""
        chosen = list(self._live if rids is None else dict.fromkeys(rids))
        if missing := [rid for rid in chosen if rid not in self._live]:
            raise RequestError(
                f"no request with rid = {missing[0]!r} is running", code="request_not_found", param="rid", status=404
            )
        if sequences := [sequence for rid in chosen for sequence in self._live[rid]]:
            self.aborted.update(sequences)
            self._client.abort(sequences)
        return len(chosen)

    def begin_drain(self) -> None:
        self.draining = True

    async def drain(self, seconds: float) -> None:
        """Finish within `seconds`, abort the rest, and wait until every response has ended."""
        self.begin_drain()
        await self._client.drain(seconds)
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            return  # a client that does not read cannot hold up the shutdown
