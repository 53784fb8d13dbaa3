"""Runs batches: checks their files, serves their lines a few at a time, and writes what they return.

    validating ─► in_progress ─► finalizing ─► completed
        └► failed      ├► failed       └► expired: lines had not begun in time
                       └► cancelling ─► cancelled

A batch enters its last state when no line runs any more; its files are then complete, with what has been returned.
Batches are in memory and end with the server; their files remain. Must not know HTTP or a protocol.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from srv.errors import EngineDead, RequestError
from srv.server.batches.files import BatchFile, FileStore, FileWriter
from srv.server.batches.lines import BatchLine, LineError, check_lines, read_line
from srv.server.batches.sender import LineAnswer, LineSender
from srv.server.http.access import Caller
from srv.server.http.body import BodyLimits
from srv.server.http.key_uses import KeyUses
from srv.server.lifecycle import Lifecycle
from srv.server.request.fields import shorten

MAX_LINES_AT_ONCE = 16  # of all batches
MAX_OPEN, MAX_OPEN_PER_OWNER = 64, 16  # batches that have not ended
MAX_KEPT = 1024  # batches, of which the oldest that ended are forgotten
WINDOW_SECONDS = 24 * 3600
FULL = "queue_full"  # the error code of a line that is sent again; another error is its result
RETRY_SECONDS = 1.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Batch:
    """One batch. `caller`: whose limits and cache its lines use. `times`: when it entered a state (Unix time), by the
    name of the state.

    `late`: lines had not begun in time. `stopped`: why the server served no more lines. Both end the batch once the
    lines that run have ended.
    """

    caller: Caller
    file: BatchFile
    endpoint: str
    metadata: Mapping[str, str]
    id: str = field(default_factory=lambda: f"batch_{uuid.uuid4().hex}")
    status: str = "validating"
    created_at: int = field(default_factory=lambda: int(time.time()))
    times: dict[str, int] = field(default_factory=dict)
    errors: list[LineError] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    files: dict[str, BatchFile] = field(default_factory=dict)  # "output" and "error"
    workers: list[asyncio.Task[None]] = field(default_factory=list)
    late: bool = False
    stopped: RequestError | EngineDead | None = None

    def enter(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_SECONDS

    def shown(self) -> dict[str, object]:
        """OpenAI's batch object."""
        output, error = (self.files.get(kind) for kind in ("output", "error"))
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [failure.shown() for failure in self.errors]} if self.errors else None,
            "input_file_id": self.file.id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": None if output is None else output.id,
            "error_file_id": None if error is None else error.id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(state) for state in states},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": dict(self.metadata) or None,
        }


class BatchRunner:
    """The batches of one server. All methods must be called on its event loop."""

    def __init__(
        self, store: FileStore, sender: LineSender, limits: BodyLimits, lifecycle: Lifecycle, uses: KeyUses
    ) -> None:
        """`lifecycle` says whether the server serves requests; if not, batches fail instead of each line. `uses`: of
        the keys with limits; a line beyond them waits."""
        self._store, self._sender, self._limits = store, sender, limits
        self._lifecycle, self._uses = lifecycle, uses
        self._batches: dict[str, Batch] = {}
        self._slots = asyncio.Semaphore(MAX_LINES_AT_ONCE)

    def create(self, caller: Caller, file: BatchFile, endpoint: str, metadata: Mapping[str, str]) -> Batch:
        """Begin a batch of a file that is held, and released at its end.

        Raises RequestError (429) if too many have not ended; the file is then still held.
        """
        self._check_open(caller.owner)
        batch = Batch(caller, file, endpoint, metadata)
        self._batches[batch.id] = batch
        self._forget()
        # Not in the context of the request that creates it, which has its own records and traces.
        task = asyncio.create_task(self._run(batch), context=contextvars.Context())
        self._lifecycle.keep(task)
        return batch

    def _check_open(self, owner: str) -> None:
        owners = [batch.caller.owner for batch in self._batches.values() if batch.status not in ENDED]
        for count, limit, whose in (
            (owners.count(owner), MAX_OPEN_PER_OWNER, "one API key"),
            (len(owners), MAX_OPEN, "all clients together"),
        ):
            if count >= limit:
                raise RequestError(
                    f"{count} batches have not ended, and {limit} is the limit of {whose}; retry when one has ended",
                    code="too_many_batches",
                    status=429,
                )

    def _forget(self) -> None:
        """Forget ended batches beyond `MAX_KEPT`, each time the oldest of the key that has most."""
        ended = {name: batch.caller.owner for name, batch in self._batches.items() if batch.status in ENDED}
        while ended and len(self._batches) > MAX_KEPT:
            ((most, _),) = Counter(ended.values()).most_common(1)
            oldest = next(name for name, owner in ended.items() if owner == most)
            del self._batches[oldest], ended[oldest]

    def get(self, owner: str, name: str) -> Batch:
        """Raises RequestError (404) if this owner has no such batch."""
        batch = self._batches.get(name)
        if batch is None or batch.caller.owner != owner:
            raise RequestError(
                f"there is no batch {shorten(name)}; batches are forgotten when the server ends",
                code="batch_not_found",
                status=404,
            )
        return batch

    def all(self, owner: str) -> list[Batch]:
        """Those of an owner, the newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.caller.owner == owner]

    def cancel(self, batch: Batch) -> None:
        """Begin no more lines and abort those that run. Raises RequestError (409) if it has ended."""
        if batch.status in ENDED or batch.status == "finalizing":
            raise RequestError(
                f"batch {batch.id} is {batch.status}; only one that has not ended can be cancelled",
                code="batch_ended",
                status=409,
            )
        if batch.status != "cancelling":
            batch.enter("cancelling")
            for worker in batch.workers:
                worker.cancel()

    # ---- one batch

    async def _run(self, batch: Batch) -> None:
        results = _Results(self._store, batch)
        try:
            offsets = await self._check(batch)
            if batch.errors:
                batch.enter("failed")
                return
            if batch.status == "validating":
                batch.enter("in_progress")
                await self._serve(batch, offsets, results)
            if batch.status == "in_progress":
                batch.enter("finalizing")
            await results.finish()
            batch.enter("cancelled" if batch.status == "cancelling" else "expired" if batch.late else "completed")
        except (RequestError, EngineDead) as error:
            code = error.code if isinstance(error, RequestError) else "engine_dead"
            await self._fail(batch, results, LineError(str(error), code=code))
        except asyncio.CancelledError:  # the event loop ends
            for worker in batch.workers:
                worker.cancel()
            await self._fail(batch, results, LineError("the server was stopped", code="shutting_down"))
            raise
        except Exception:
            logger.exception("%s failed", batch.id)
            message = "the server failed on this batch; see its log"
            await self._fail(batch, results, LineError(message, code="internal_error"))
        finally:
            batch.workers.clear()
            self._store.release(batch.file)

    async def _fail(self, batch: Batch, results: _Results, why: LineError) -> None:
        batch.errors.append(why)
        try:
            await results.finish()
        except RequestError as error:
            logger.error("the results of %s are lost: %s", batch.id, error)
        batch.enter("failed")

    async def _check(self, batch: Batch) -> Iterator[int]:
        """The offsets of the lines. What is wrong with them becomes the batch's errors."""
        path = self._store.path(batch.file)
        read = await asyncio.to_thread(self._store.guarded, partial(check_lines, path, batch.endpoint, self._limits))
        batch.errors += read.errors
        batch.total = len(read.offsets)
        return iter(read.offsets)

    async def _serve(self, batch: Batch, offsets: Iterator[int], results: _Results) -> None:
        """Serve all lines. Raises why the server stopped, or the first failure, after all workers have ended."""
        count = min(MAX_LINES_AT_ONCE, batch.total)
        batch.workers = [asyncio.create_task(self._work(batch, offsets, results)) for _ in range(count)]
        _, pending = await asyncio.wait(batch.workers, return_when=asyncio.FIRST_EXCEPTION)
        for worker in pending if batch.status != "cancelling" else ():
            worker.cancel()  # one has failed
        await asyncio.gather(*batch.workers, return_exceptions=True)
        for worker in batch.workers:
            if not worker.cancelled() and (error := worker.exception()) is not None:
                raise error
        if batch.stopped is not None:
            raise batch.stopped

    async def _work(self, batch: Batch, offsets: Iterator[int], results: _Results) -> None:
        path = self._store.path(batch.file)
        for offset in offsets:
            if not await self._counted(batch):
                return
            try:
                async with self._slots:
                    line = await asyncio.to_thread(self._store.guarded, partial(read_line, path, offset))
                    answer = await self._answer(batch, line)
            finally:
                if (use := self._uses.of(batch.caller.client)) is not None:
                    use.leave()
            if answer is None:
                return
            await asyncio.shield(results.add(line, answer))  # a file that is being written has no other writer
            if results.failure is not None:
                raise results.failure

    async def _counted(self, batch: Batch) -> bool:
        """Wait until the key may send one more request, without a slot: others have theirs meanwhile. False: the batch
        ends before."""
        use = self._uses.of(batch.caller.client)
        while use is not None and (refused := use.refusal()) is not None:
            if not self._goes_on(batch):
                return False
            await asyncio.sleep(min(RETRY_SECONDS, refused[1]))
        return True

    async def _answer(self, batch: Batch, line: BatchLine) -> LineAnswer | None:
        """Serve a line, again and again while the queue is full. None: the batch ends before it is served."""
        while self._goes_on(batch):
            answer = await self._sender.send(batch.endpoint, bytes(line.body), batch.caller)
            if answer.status == 503 and self._stopped(batch):
                return None
            if answer.code != FULL:
                return answer
            await asyncio.sleep(RETRY_SECONDS)
        return None

    def _goes_on(self, batch: Batch) -> bool:
        """Whether one more line is served. Call it only if there is one: it is then late, or stopped."""
        if batch.status != "in_progress" or self._stopped(batch):
            return False
        batch.late = batch.late or time.time() >= batch.expires_at
        return not batch.late

    def _stopped(self, batch: Batch) -> bool:
        """Whether the server serves no more requests, which ends the batch."""
        if batch.stopped is None:
            try:
                self._lifecycle.check_accepting()
            except (RequestError, EngineDead) as error:
                batch.stopped = error
        return batch.stopped is not None


class _Results:
    """The files with what the lines of a batch return, which are made for the first result.

    `failure`: why no more results can be kept.
    """

    def __init__(self, store: FileStore, batch: Batch) -> None:
        self._store, self._batch = store, batch
        self._writers: dict[str, FileWriter] = {}
        self.failure: RequestError | None = None
        self._lock = asyncio.Lock()

    async def add(self, line: BatchLine, answer: LineAnswer) -> None:
        succeeded = answer.status < 300
        name = f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": answer.status, "request_id": name, "body": msgspec.Raw(answer.body)}
        response |= {"headers": dict(answer.headers)} if answer.headers else {}
        entry = {"id": name, "custom_id": line.custom_id, "response": response, "error": None}
        data = msgspec.json.encode(entry) + b"\n"
        async with self._lock:
            if self.failure is not None:
                return
            try:
                await asyncio.to_thread(self._append, "output" if succeeded else "error", data)
            except RequestError as error:
                self.failure = error
                return
        self._batch.completed += succeeded
        self._batch.failed += not succeeded

    def _append(self, kind: str, data: bytes) -> None:
        if (writer := self._writers.get(kind)) is None:
            name = f"{self._batch.id}_{kind}.jsonl"
            writer = self._writers[kind] = self._store.writer(self._batch.caller.owner, name, "batch_output")
        writer.append(data)

    async def finish(self) -> None:
        """Let the owner see the files. Raises RequestError if one cannot be finished; it is then discarded."""
        failure: RequestError | None = None
        async with self._lock:
            while self._writers:
                kind, writer = self._writers.popitem()
                try:
                    self._batch.files[kind] = await asyncio.to_thread(writer.finish)
                except RequestError as error:
                    failure = error
                    await asyncio.to_thread(writer.discard)
        if failure is not None:
            raise failure
