"""Builds responses and events: on the event loop if they are small, else in a thread, so that no stream waits for them.

Must not know protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from srv.server.generation import CompletedSequence, OutputDelta
from srv.types import TokenLogprob

INLINE_ENTRIES = 512  # log-probabilities, which take about two milliseconds; text takes much less

T = TypeVar("T")


async def build(results: Iterable[CompletedSequence | OutputDelta], work: Callable[[], T]) -> T:
    """The result of `work`, which shows these results, or the part of them that is new."""
    count = sum(_entries(result.logprobs) + _entries(result.prompt_logprobs or ()) for result in results)
    return work() if count <= INLINE_ENTRIES else await asyncio.to_thread(work)


def _entries(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(1 + len(logprob.top) + len(logprob.listed) for logprob in logprobs)
