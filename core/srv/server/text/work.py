"""Where the text of a request is encoded, decoded and rendered: on the event loop if it is little, else in a thread.

Owns the threads and how much text one request may have on the event loop. The rest of a request is cut into parts, each
a task of its own, so that requests with much text take turns. Must not know HTTP, limits of the model or protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from srv.errors import RequestError
from srv.server.text.gathering import Gathering
from srv.server.text.options import DEFAULT_TEXT_OPTIONS, TextOptions
from srv.server.text.processor import TextProcessor

INLINE_COST = 4096  # characters or tokens of one request that are processed on the event loop: about a millisecond
PART_COST = 16_384  # characters or tokens of one task in a thread
COST_PER_TEXT = 64  # what a text costs beyond its characters
TEXT_THREADS = 2

T = TypeVar("T")


def split(sizes: Sequence[int], limit: int = PART_COST) -> list[range]:
    """Consecutive indices of texts in parts that cost up to `limit`, or consist of one text. `sizes`: their lengths."""
    parts: list[range] = []
    begin, cost = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and cost + size + COST_PER_TEXT > limit:
            parts.append(range(begin, index))
            begin, cost = index, 0
        cost += size + COST_PER_TEXT
    return [*parts, range(begin, len(sizes))] if sizes else parts


class EncodeCounts(Collector):
    """Exports how many texts were encoded, in how many calls of the tokenizer."""

    def __init__(self) -> None:
        self._texts = self._calls = 0

    def add(self, texts: int, *, calls: int) -> None:
        self._texts += texts
        self._calls += calls

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("srv_texts_encoded", "Texts that were encoded.", value=self._texts)
        yield CounterMetricFamily("srv_encode_calls", "Calls of the tokenizer that encoded them.", value=self._calls)


class TextWork:
    """The text processor of one server, without delaying its event loop."""

    def __init__(self, text: TextProcessor, options: TextOptions = DEFAULT_TEXT_OPTIONS) -> None:
        self._text, self._options = text, options
        self.counts = EncodeCounts()
        threads = max(TEXT_THREADS, options.processes)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="srv-text")
        self._gathering = Gathering(self._together, options.gather_texts, options.gather_seconds)
        # Templates are rendered one at a time, and must not keep texts from being encoded.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="srv-template")
        self._renderer_of_requests = ThreadPoolExecutor(1, thread_name_prefix="srv-requested-template")
        self._closed = False

    def close(self) -> None:
        """Drop what waits, and end a rendering that runs; both raise RequestError (503), as later calls do."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._renderer.shutdown(wait=False, cancel_futures=True)
        self._renderer_of_requests.shutdown(wait=False, cancel_futures=True)
        self._text.close()

    async def run(self, work: Callable[[], T], inline: bool) -> T:
        return work() if inline else await self._in_thread(self._threads, work)

    async def _in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # the work was dropped, and nobody cancelled the request
                self._check_open()
            raise
        except RequestError:
            self._check_open()  # the template is not to blame for the end of its process
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(
                "the server is shutting down and does not finish this request; retry later",
                code="shutting_down",
                status=503,
            )

    async def encode_part(self, texts: Sequence[str], special: bool, inline: bool) -> list[list[int]]:
        """The token ids of a few texts of a request. `inline`: the request as a whole has little text."""
        options = self._options
        if options.gather:
            return list(await asyncio.gather(*(self._gathering.encode(text, special) for text in texts)))
        if (options.together and len(texts) > 1) or (options.processes > 1 and not inline):
            return await self._together(texts, special)
        self.counts.add(len(texts), calls=len(texts))
        return await self.run(lambda: [self._text.encode(text, special) for text in texts], inline)

    async def _together(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        self.counts.add(len(texts), calls=1)
        return await self.run(lambda: self._text.encode_batch(texts, special), inline=False)

    async def decode_all(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """The texts of all token sequences of a request."""
        sizes = list(map(len, sequences))
        inline = is_little(sizes)
        texts: list[str] = []
        for part in split(sizes):
            texts += await self.run(
                lambda part=part: [self._text.decode(sequences[at], skip_special_tokens) for at in part],  # type: ignore[misc]
                inline,
            )
        return texts

    async def render(
        self,
        messages: list[dict[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        template: str | None,
    ) -> str:
        """The prompt text of a conversation. `variables`: more variables of the template. `template`: the request's."""
        text = self._text
        if template is None:
            work = partial(text.apply_chat_template, messages)
        else:
            work = partial(text.apply_template_of_request, template, messages)
        conversation = partial(work, add_generation_prompt=add_generation_prompt, variables=variables)
        return await self._in_thread(self._renderer if template is None else self._renderer_of_requests, conversation)


def is_little(sizes: Sequence[int]) -> bool:
    """Whether texts of these lengths, all those of one request, are processed on the event loop."""
    return sum(sizes) + COST_PER_TEXT * len(sizes) <= INLINE_COST + COST_PER_TEXT
