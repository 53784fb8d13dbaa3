"""Requests that a server sends to itself before it is ready, so that the first client waits for nothing.

Owns the routines and their names. What they compute is counted in the metrics like any request; the prefix cache is
cleared afterwards. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from srv.errors import EngineDead, RequestError, StartError
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service

TOKENS = 8  # output tokens of each request
CONCURRENT = 8  # requests of the routine `batch`
LONG_PROMPT = 2048  # tokens
MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
logger = logging.getLogger(__name__)


def _one(service: Service) -> list[list[int]]:
    return [[0] * _fitting(service, 4)]


def _long(service: Service) -> list[list[int]]:
    return [[0] * _fitting(service, LONG_PROMPT)]


def _batch(service: Service) -> list[list[int]]:
    return [[0] * _fitting(service, 4 + number) for number in range(CONCURRENT)]


def _fitting(service: Service, tokens: int) -> int:
    return max(1, min(tokens, service.settings.request_token_limit - TOKENS))


GENERATE, CHAT = "generate", "chat"
ROUTINES: Mapping[str, Callable[[Service], list[list[int]]]] = {GENERATE: _one, "long_prompt": _long, "batch": _batch}


async def warm_up(service: Service, names: Sequence[str]) -> None:
    """Run these routines, one after another. Raises StartError if one fails."""
    for name in names:
        started = time.monotonic()
        try:
            prompts = await _conversation(service) if name == CHAT else ROUTINES[name](service)
            await _generate(service, prompts)
        except (RequestError, EngineDead) as error:
            remedy = "start with --skip-server-warmup" if name == GENERATE else "leave it out of --warmups"
            line = f"the warm-up {name} failed: {error}; {remedy}, or see the engine's log"
            raise StartError([line], 1) from error
        logger.info("warm-up %s took %.2f s", name, time.monotonic() - started)
    if names:
        await service.client.flush()


async def _conversation(service: Service) -> list[list[int]]:
    text = await service.preprocessor.render(MESSAGES, True, {})
    return await service.preprocessor.encode([text], False, "messages")


async def _generate(service: Service, prompts: list[list[int]]) -> None:
    """Continue the prompts, or pool them if the model generates no text."""
    if not service.settings.generates:
        await asyncio.gather(*(service.pool_one(prompt, f"warmup-{uuid.uuid4().hex}") for prompt in prompts))
        return
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    prepared = [
        await service.preprocessor.prepare(prompt, sampling, param="prompt", default_max_tokens=TOKENS)
        for prompt in prompts
    ]
    rids = [f"warmup-{uuid.uuid4().hex}" for _ in prepared]
    ticket, group = service.start(prepared, rids, time.perf_counter())
    try:
        await group.gather()
    finally:
        ticket.close()
