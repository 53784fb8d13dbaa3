"""Tracks the active client requests and their ids, and whether new ones are accepted.

Owns request ids (`rid`) and graceful shutdown. Must not know protocols or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence

from srv.errors import RequestError
from srv.server.client import EngineClient
from srv.types import FinishReason

Key = tuple[str, str]  # owner and request id: clients with different keys may use the same ids
SHUTDOWN_MESSAGE = "the server is shutting down; the output is incomplete"
RESPONSE_FLUSH_SECONDS = 2.0  # after the engine has drained: time for responses to reach their clients


class Ticket:
    """One active HTTP request: its sequence ids at the engine by request id. Close it exactly once."""

    def __init__(
        self, lifecycle: Lifecycle, sequences_by_rid: dict[Key, tuple[str, ...]], batch: Key | None = None
    ) -> None:
        self.sequences_by_rid = sequences_by_rid
        self.batch = batch
        self._lifecycle = lifecycle

    def is_aborted(self, sequence: str) -> bool:
        """Whether this sequence was aborted, in which case it must not be sent to the engine."""
        return sequence in self._lifecycle.aborted

    @property
    def sequences(self) -> list[str]:
        return [sequence for sequences in self.sequences_by_rid.values() for sequence in sequences]

    def close(self) -> None:
        self._lifecycle._close(self)


class Lifecycle:
    """Admits client requests while the server accepts them.

    Shutdown: `begin_drain()` refuses new requests with a 503; `await drain(seconds)` does so too, lets running ones
    finish, makes the engine abort the rest, and returns when the last response has ended.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._active: dict[Key, tuple[str, ...]] = {}  # request -> ids of its sequences at the engine
        self._batches: dict[Key, tuple[Key, ...]] = {}  # batch -> requests of its prompts
        self._serial = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.hung = False  # the engine is; see `srv.server.watchdog`
        self.kept: set[asyncio.Task[None]] = set()  # work that outlives the request that began it
        self.aborted: set[str] = set()  # sequences of active requests that were aborted

    @property
    def active(self) -> int:
        """The number of request ids whose responses have not ended."""
        return len(self._active)

    @property
    def healthy(self) -> bool:
        return self._client.alive and not self.draining and not self.hung

    def check_accepting(self) -> None:
        """Raises RequestError (503) during a shutdown, EngineDead if the engine is gone."""
        if self.draining:
            raise RequestError(
                "the server is shutting down and accepts no new requests; retry later",
                code="shutting_down",
                status=503,
            )
        self._client.check_alive()

    def check_not_aborted(self, finishes: Iterable[FinishReason]) -> None:
        """Raises RequestError (503) if a shutdown aborted an output: OpenAI has no finish reason for that."""
        if self.draining and FinishReason.ABORT in finishes:
            raise RequestError(SHUTDOWN_MESSAGE, code="shutting_down", status=503)

    def check_complete(self, finishes: Sequence[FinishReason]) -> None:
        """Raises RequestError if an output was aborted, by a shutdown (503) or by /abort_request (499).

        For responses that have no finish reason at all.
        """
        self.check_not_aborted(finishes)
        if FinishReason.ABORT in finishes:
            raise RequestError("the request was aborted", code="request_aborted", status=499)

    def admit(self, requests: Sequence[tuple[str, int]], batch: str | None = None, owner: str = "") -> Ticket:
        """Register request ids, each with its number of sequences, in order. `batch`: an id by which all are aborted.
        `owner`: as in `RequestSpec`.

        Raises RequestError if the server is draining, or if an id is in use or occurs twice.
        """
        self.check_accepting()
        sequences_by_rid: dict[Key, tuple[str, ...]] = {}
        if batch is not None:
            self._check_unused((owner, batch), ())
        for rid, sequences in requests:
            self._check_unused((owner, rid), sequences_by_rid)
            # The serial keeps engine ids unique if a client reuses an id while the engine is still aborting the
            # previous request.
            self._serial += 1
            sequences_by_rid[owner, rid] = tuple(f"{rid}.{self._serial}.{index}" for index in range(sequences))
        self._active |= sequences_by_rid
        whole = None if batch is None else (owner, batch)
        if whole is not None:
            self._batches[whole] = tuple(sequences_by_rid)
        self._idle.clear()
        return Ticket(self, sequences_by_rid, whole)

    def _check_unused(self, key: Key, others: Container[Key]) -> None:
        if key in self._active or key in self._batches or key in others:
            reason = "it occurs twice" if key in others else "a request with this id is running"
            raise RequestError(
                f"rid = {key[1]!r} is refused: {reason}; use another one",
                code="duplicate_request",
                param="rid",
                status=409,
            )

    def _close(self, ticket: Ticket) -> None:
        if ticket.batch is not None:
            self._batches.pop(ticket.batch, None)
        for rid in ticket.sequences_by_rid:
            self._active.pop(rid, None)
        self.aborted.difference_update(ticket.sequences)
        if not self._active:
            self._idle.set()

    def abort(self, rids: Sequence[str] | None, owner: str | None = None) -> int:
        """Abort these client requests (None: all) and return their number; an id of a batch stands for its prompts.

        `owner`: whose requests they are; None: anybody's. Raises RequestError (404) if one is not running.
        """
        selected = dict.fromkeys(self._active)
        if rids is not None:
            selected = dict.fromkeys(key for rid in rids for key in self._running(rid, owner))
        if sequences := [sequence for key in selected for sequence in self._active[key]]:
            self.aborted.update(sequences)
            self._client.abort(sequences)
        return len(selected)

    def _running(self, rid: str, owner: str | None) -> list[Key]:
        """The requests of this id, or of the batch of this id. Raises RequestError if there is none."""
        keys = [key for key in (*self._active, *self._batches) if key[1] == rid and owner in (None, key[0])]
        if not keys:
            raise RequestError(
                f"no request with rid = {rid!r} is running", code="request_not_found", param="rid", status=404
            )
        return [batch for key in keys for batch in self._batches.get(key, (key,))]

    def begin_drain(self) -> None:
        self.draining = True

    async def drain(self, seconds: float) -> None:
        """Let requests finish within `seconds`, abort the rest, and wait until every response has ended."""
        self.begin_drain()
        await self._client.drain(seconds)
        try:
            async with asyncio.timeout(RESPONSE_FLUSH_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            return  # a client that does not read its response must not delay the shutdown

    def keep(self, task: asyncio.Task[None]) -> None:
        """Let the end of the server wait for a task that outlives its request, and ends soon after a drain."""
        self.kept.add(task)
        task.add_done_callback(self.kept.discard)

    async def settle(self) -> None:
        """Wait until the tasks have ended that were kept. Call it when no more requests arrive."""
        if self.kept:
            await asyncio.wait(self.kept, timeout=RESPONSE_FLUSH_SECONDS)
