"""The process of one rank, `python -m srv.worker.process`; it reads its RankSpec from standard input.

It loads its part of the model, then handles the engine's messages in order until its parent process kills it. If the
parent exits without doing so, a thread ends this process, whatever it waits for. It schedules nothing, and prints no
traceback for errors that an operator can fix.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from srv.dist.group import RankGroup
from srv.errors import RankLost, startup_failure
from srv.executor.protocol import Launched, Worker, carry_out
from srv.executor.rank_messages import (
    Allocate,
    Allocated,
    ControlRank,
    Failed,
    FromRank,
    Measure,
    Measured,
    Ping,
    Pong,
    RankControlled,
    RankLoaded,
    RankSpec,
    RunStep,
    SampleStep,
    Stepped,
    ToRank,
    digest,
)
from srv.executor.spec import EngineSpec, decode
from srv.io import child
from srv.io.phases import Phases

logger = logging.getLogger(__name__)

_WORKER_MODULE = "srv.worker.rank"
_PARENT_INTERVAL_S = 0.5  # between two checks of the parent process


class RankProcess:
    """Handles the messages of the engine, with one worker.

        main thread       message ──► launch ──► message ──► launch ──► …
        pool's thread                   └──► collect ──► answer └──► collect ──► answer

    So that the next step is enqueued while the device computes this one, another thread waits for the device. It also
    sends all other answers, because a socket belongs to one thread, and because answers keep the order of messages.
    """

    def __init__(self, spec: RankSpec, phases: Phases | None = None) -> None:
        """`phases`: those of this process so far."""
        self._phases = phases or Phases()
        self._spec, self._rank = spec, spec.number
        self._context = zmq.Context()
        self._in: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._out: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        for socket in (self._in, self._out):
            socket.set_hwm(0)
        self._in.connect(spec.to_rank)
        self._out.connect(spec.from_ranks)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="srv-answers")
        self._ready = False  # whether it has allocated everything
        self._failure: Stepped | None = None  # of the forward pass of a step that waits for late inputs

    def run(self, make_worker: Callable[[EngineSpec, RankGroup], Worker]) -> int:
        worker: Worker | None = None
        try:
            worker = make_worker(self._spec.engine, self._spec.group)
            worker.load()
            self._answer(RankLoaded(self._rank))
            while True:
                self._handle(self._decoder.decode(self._in.recv()), worker)
        except Exception as error:
            lines, status = ([_text(error)], 1) if self._ready else startup_failure(error)
            peer_lost = isinstance(error, RankLost)
            if status == 1 and not peer_lost:
                logger.error("rank %d failed", self._rank, exc_info=error)
            self._answer(Failed(self._rank, lines, status, peer_lost))
            return 1
        finally:
            if worker is not None:
                worker.close()

    def _handle(self, message: ToRank, worker: Worker) -> None:
        match message:
            case RunStep(plan):
                self._launch(plan.step, lambda: worker.launch(plan), late=bool(plan.late))
            case SampleStep(step, late):
                self._sample(step, lambda: worker.sample(step, late))
            case ControlRank(command):
                self._answer(RankControlled(self._rank, carry_out(worker, command)))
            case Ping():
                self._answer(Pong(self._rank))
            case Measure():
                self._answer(Measured(self._rank, worker.measure()))
            case Allocate(budget):
                allocation = worker.allocate(budget)
                self._phases.add(allocation.phases)
                self._answer(Allocated(self._rank, allocation._replace(phases=self._phases.done)))
                child.ready()
                self._ready = True

    def _launch(self, step: int, launch: Callable[[], Launched | None], *, late: bool) -> None:
        """Enqueue a step. Its answer follows when it has been computed; if it waits for late inputs, when it samples.

        An error of any part of it ends only the requests of the step.
        """
        self._failure = None
        try:
            launched = launch()
        except Exception as error:  # noqa: BLE001 - see above
            self._failure = self._failed(step, error)
        if self._failure is not None:
            if not late:
                self._answer(self._failure)
        elif launched is not None:
            self._pool.submit(self._collect, step, launched).add_done_callback(_end_on_error)

    def _sample(self, step: int, sample: Callable[[], Launched]) -> None:
        if self._failure is not None:
            self._answer(self._failure)
        else:
            self._launch(step, sample, late=False)

    def _collect(self, step: int, launched: Launched) -> None:
        try:
            result = launched.collect()
            answer = Stepped(self._rank, step, digest(result), result if self._rank == 0 else None)
        except Exception as error:  # noqa: BLE001 - see `_launch`
            answer = self._failed(step, error)
        self._send(answer)

    def _failed(self, step: int, error: Exception) -> Stepped:
        return Stepped(self._rank, step, error=_text(error), peer_lost=isinstance(error, RankLost))

    def _answer(self, message: FromRank) -> None:
        """Send a message after the answers of all steps that are launched."""
        self._pool.submit(self._send, message).add_done_callback(_end_on_error)

    def _send(self, message: FromRank) -> None:
        """Runs on the pool's thread."""
        self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        self._pool.shutdown()
        self._context.destroy(linger=1000)


def _end_on_error(sent: Future[None]) -> None:
    """An answer that cannot be sent is a bug; the engine must not wait for it."""
    if error := sent.exception():
        logger.critical("an answer cannot be sent", exc_info=error)
        os._exit(1)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def end_with_parent(spec: RankSpec) -> None:
    """Run on a thread of its own: end this process once its parent has exited, and remove the sockets."""
    while os.getppid() == spec.parent:
        time.sleep(_PARENT_INTERVAL_S)
    for directory in {spec.group.directory, str(Path(urlsplit(spec.to_rank).path).parent)}:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _make_worker(engine: EngineSpec, group: RankGroup) -> Worker:
    from srv.worker.rank import RankWorker

    return RankWorker(engine, group)


def main() -> int:
    phases = Phases()
    payload = child.begin([_WORKER_MODULE], phases)
    if not payload:
        return 1  # the engine process has exited already
    spec = decode(payload, RankSpec)
    replica = f"replica {spec.engine.replica} " if spec.engine.config.parallel.dp_size > 1 else ""
    child.log_as(f"{replica}rank {spec.number}", spec.engine.log_level)
    threading.Thread(target=end_with_parent, args=(spec,), daemon=True).start()
    process = RankProcess(spec, phases)
    try:
        return process.run(_make_worker)
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
