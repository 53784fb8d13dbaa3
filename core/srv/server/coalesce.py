"""Fewer, larger deltas of a stream (`--stream-interval`). Must not know what a delta is sent as."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from srv.errors import EngineDead, RequestError

if TYPE_CHECKING:
    from srv.server.generation import OutputDelta


def coalesced(deltas: AsyncGenerator[OutputDelta, None], interval: int) -> AsyncGenerator[OutputDelta, None]:
    """The same output in deltas of at least `interval` tokens. The first delta with tokens, and the last, do not wait.

    An error follows what was produced before it.
    """
    return deltas if interval == 1 else _coalesced(deltas, interval)


async def _coalesced(deltas: AsyncGenerator[OutputDelta, None], interval: int) -> AsyncGenerator[OutputDelta, None]:
    held: OutputDelta | None = None
    missing = 1
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                held = delta if held is None else _merged(held, delta)
                if len(held.tokens) >= missing or held.finish is not None:
                    ready, held, missing = held, None, interval
                    yield ready
        except (EngineDead, RequestError):
            if held is not None:
                yield held
            raise


def _merged(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    return replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
    )
