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
from srv.server.metrics import Metrics
from srv.server.observers import Observers
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
    reason, cached = FinishReason.ABORT, 0  # unless the engine reports another
    observers.started(spec)
    try:
        if aborted(spec.id):
            return Embedding(len(spec.tokens), 0, reason, b"")
        last = [output async for output in engine.generate(spec)][-1]
        assert last.finish is not None
        reason, cached = last.finish, last.cached_tokens
        return Embedding(len(spec.tokens), last.cached_tokens, reason, last.vectors or b"")
    except (EngineDead, RequestError):
        reason = FinishReason.ERROR
        raise
    finally:
        seconds = time.perf_counter() - arrival
        metrics.sequence_ended(reason, seconds)
        observers.finished(spec, reason, cached, 0, seconds)
