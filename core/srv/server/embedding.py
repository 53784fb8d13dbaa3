"""Turns prompts into embeddings, with one request to the engine per prompt.

Must not know HTTP or the format of any protocol.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from srv.errors import EngineDead, RequestError
from srv.server.client import EngineClient
from srv.server.observe.metrics import Metrics
from srv.server.observe.observers import Observers
from srv.types import FinishReason, RequestSpec


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one prompt. `vector`: float32, little-endian; empty if `finish` is ABORT."""

    prompt_tokens: int
    cached_tokens: int
    finish: FinishReason
    vector: bytes

    def elements(self) -> list[float]:
        return unpack_floats(self.vector)


def unpack_floats(data: bytes | bytearray) -> list[float]:
    """The numbers in little-endian float32 bytes."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


async def embed(
    engine: EngineClient,
    metrics: Metrics,
    observers: Observers,
    specs: Sequence[RequestSpec],
    *,
    arrival: float,
    aborted: Callable[[str], bool],
) -> list[Embedding]:
    """The embeddings in the order of `specs`, whose parameters are PoolingParams.

    `aborted` says whether a request was aborted before it was sent to the engine. The first failure (RequestError or
    EngineDead) aborts the other requests and is raised; cancellation aborts all of them.
    """
    tasks = [asyncio.create_task(_embed_one(engine, metrics, observers, spec, arrival, aborted)) for spec in specs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed_one(
    engine: EngineClient,
    metrics: Metrics,
    observers: Observers,
    spec: RequestSpec,
    arrival: float,
    aborted: Callable[[str], bool],
) -> Embedding:
    record = observers.begin(spec.id, arrival)  # its reason is ABORT, unless the engine reports another
    record.spec = spec
    observers.started(spec)
    try:
        if aborted(spec.id):
            return Embedding(len(spec.tokens), 0, record.reason, b"")
        last = [output async for output in engine.generate(spec)][-1]
        assert last.finish is not None
        record.reason, record.cached_tokens, record.scheduled = last.finish, last.cached_tokens, last.scheduled_at
        return Embedding(len(spec.tokens), last.cached_tokens, last.finish, last.vectors or b"")
    except (EngineDead, RequestError):
        record.reason = FinishReason.ERROR
        raise
    finally:
        record.ended = time.perf_counter()
        metrics.of(record.labels).ended(record)
        observers.ended(record)
