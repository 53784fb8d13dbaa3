"""Texts of concurrent requests, gathered into one call of the tokenizer (`--enable-dynamic-batch-tokenizer`).

Must not know how texts are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from srv.errors import RequestError

Encode = Callable[[Sequence[str], bool], Awaitable[list[list[int]]]]
_Waiting = tuple[str, bool, "asyncio.Future[list[int]]"]


class Gathering:
    """Calls `encode` with at most `texts` texts, at most `seconds` after the first of them has come.

    A text that cannot be encoded fails alone.
    """

    def __init__(self, encode: Encode, texts: int, seconds: float) -> None:
        self._encode, self._texts, self._seconds = encode, texts, seconds
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def encode(self, text: str, special: bool) -> list[int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        self._waiting.append((text, special, future))
        if len(self._waiting) >= self._texts:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(self._seconds, self._start)
        return await future

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for special in (True, False):
            if chosen := [text for text in waiting if text[1] is special and not text[2].done()]:
                call = asyncio.ensure_future(self._run(chosen, special))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _run(self, waiting: Sequence[_Waiting], special: bool) -> None:
        try:
            encoded = await self._encode([text for text, _, _ in waiting], special)
        except RequestError as error:
            if len(waiting) == 1:
                _fail(waiting, error)
                return
            await asyncio.gather(*(self._run([text], special) for text in waiting))
        except asyncio.CancelledError as error:
            _fail(waiting, error)
            raise
        except Exception as error:  # noqa: BLE001 - whoever waits for the text raises it
            _fail(waiting, error)
        else:
            for (_, _, future), ids in zip(waiting, encoded, strict=True):
                if not future.done():
                    future.set_result(ids)


def _fail(waiting: Sequence[_Waiting], error: BaseException) -> None:
    for _, _, future in waiting:
        if not future.done():
            future.set_exception(error)
