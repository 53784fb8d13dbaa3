"""Structured output in the API process: grammars are checked before a request goes to the engine, answers when it ends.

    GrammarSource ──► cache ──► a child process with limits ──► Grammar of a RequestSpec, or a 400
    text of the answer ──► AnswerCheck ──► whether it follows its grammar

Owns the limits on grammars and the cache. Nothing here blocks the event loop. Must not know request bodies.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec

from srv.errors import GrammarError, RequestError
from srv.grammar.backend import GrammarBackend, GrammarContext, Matcher
from srv.grammar.child import GrammarReply, GrammarSetup
from srv.grammar.registry import GRAMMAR_OFF, make
from srv.grammar.source import GrammarSource
from srv.io.bounded_process import BoundedProcess, Lost, WorkLimits
from srv.server.request.fair_queue import Crowded, FairQueue
from srv.server.request.fields import shorten
from srv.server.settings import GrammarSettings
from srv.server.text.processor import TextProcessor
from srv.types import Grammar, Vocabulary

_MODULE = "srv.grammar.child"
MAX_SOURCE_BYTES = 2**20
MAX_WAITING = 64  # grammars that wait to be checked, in shares of the keys; more are refused
MAX_CACHED = 256  # checked grammars, and refusals
MAX_CACHED_BYTES = 32 * 2**20
CHECK_SECONDS = 0.05  # of the processor, for the check of one answer
PROCESSES = 2
LIMITS = WorkLimits(processor_seconds=3.0, seconds=10.0, memory_bytes=2**30)
_ALIASES = {"guidance": "llguidance"}  # vLLM's names


class _NotChecked(GrammarError):
    """The process that checks grammars was lost by a fault of the machine, so that it may be tried again."""


class CheckedGrammar(NamedTuple):
    """A grammar that an engine can compile. `check`: makes what checks an answer; None if its text cannot be checked,
    because it refers to special tokens. `left_out`: what of schemas that are not strict is not enforced."""

    grammar: Grammar
    check: Callable[[], AnswerCheck] | None
    left_out: tuple[str, ...] = ()


class AnswerCheck:
    """Whether the text of one answer follows its grammar. Costs about a microsecond per byte.

    A byte of an ambiguous grammar may cost milliseconds, for which all other answers wait: `given_up` says that the
    check has taken `CHECK_SECONDS` of the processor and ended, so that `valid` is not known.
    """

    def __init__(self, make_matcher: Callable[[], Matcher], begins_after: str) -> None:
        self._make_matcher, self._begins_after = make_matcher, begins_after
        self._matcher = make_matcher()
        self._tail = ""
        self._leading = False  # since `begins_after`, there was only white space: `_space`
        self._space = ""
        self._valid = True
        self._seconds = 0.0

    @property
    def given_up(self) -> bool:
        return self._seconds > CHECK_SECONDS

    def feed(self, text: str) -> None:
        """The next part of the text."""
        if not self.given_up:
            began = time.thread_time()
            self._feed(text)
            self._seconds += time.thread_time() - began

    def _feed(self, text: str) -> None:
        if self._begins_after:
            self._tail += text
            before, marker, text = self._tail.partition(self._begins_after)
            if not marker:
                self._tail = before[-len(self._begins_after) :]
                return
            self._begins_after, self._leading = "", True
        if self._leading:
            self._space += text
            if not self._space or self._space.isspace():
                return
            text, self._space, self._leading = self._space, "", False
            # The token that ends `begins_after` may have white space behind it, where the engine's grammar begins.
            if text[0].isspace() and not _accepts(self._make_matcher(), text):
                text = text.lstrip()
        self._valid = self._valid and _accepts(self._matcher, text)

    @property
    def valid(self) -> bool:
        """Whether the text so far is a complete answer."""
        if not self._valid or self._begins_after:
            return False
        if self._matcher.accepting or not self._space:
            return self._matcher.accepting
        spaced = self._make_matcher()
        return _accepts(spaced, self._space) and spaced.accepting


class Grammars:
    """The grammars of one server. `send`: sends a message to the engine, in order."""

    def __init__(self, settings: GrammarSettings, text: TextProcessor, send: Callable[[Vocabulary], None]) -> None:
        self._settings, self._text, self._send = settings, text, send
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="srv-grammar")
        self._processes: SimpleQueue[BoundedProcess] = SimpleQueue()
        self._all_processes: list[BoundedProcess] = []
        self._prepared: asyncio.Task[None] | None = None
        self._bytes_backend: GrammarBackend | None = None
        self._checked: OrderedDict[GrammarSource, asyncio.Task[CheckedGrammar]] = OrderedDict()
        self._queue = FairQueue(PROCESSES, MAX_WAITING)
        self._closed = False

    def check_backend(self, name: str) -> None:
        """Raises RequestError if a request asks for another backend than this server has. "": it asks for none."""
        backend = self._settings.backend
        if _ALIASES.get(name, name) not in ("", "auto", backend):
            raise RequestError(
                f"guided_decoding_backend = {shorten(name)} is refused: the grammar backend of this server is"
                f" {backend}; remove the field, or start the server with another --grammar-backend",
                code="invalid_value",
                param="guided_decoding_backend",
            )

    def close(self) -> None:
        """End the processes; requests whose grammars are being checked get RequestError (503)."""
        self._closed = True
        self._queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all_processes:
            process.close()

    async def check(self, source: GrammarSource, owner: str = "") -> CheckedGrammar:
        """The grammar of a request. `owner`: whoever sent it (`RequestSpec.owner`). Raises RequestError."""
        self._refuse_early(source)
        key = msgspec.structs.replace(source, param="")
        while (task := self._checked.get(key)) is not None:
            try:
                return await self._result(task, key, source.param)
            except Crowded:
                continue  # it waited for another request, perhaps of another owner
        task = self._checked[key] = asyncio.create_task(self._check(key, owner))
        task.add_done_callback(_retrieve)
        self._evict()
        try:
            return await self._result(task, key, source.param)
        except Crowded as crowded:
            raise RequestError(
                f"{source.param}: {crowded.waiting} other grammars of this key are waiting to be compiled,"
                " and the queue is full; retry later",
                code="too_many_grammars",
                param=source.param,
                status=503,
            ) from None

    async def _result(self, task: asyncio.Task[CheckedGrammar], key: GrammarSource, param: str) -> CheckedGrammar:
        """Raises RequestError, or Crowded."""
        if key in self._checked:
            self._checked.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except _NotChecked as error:
            message = f"{param} could not be compiled: {error}; retry later"
            raise RequestError(message, code="grammars_busy", param=param, status=503) from None
        except GrammarError as error:
            message = f"{param} is refused: {error}; change it"
            raise RequestError(message, code="invalid_grammar", param=param) from None

    async def send_vocabulary(self, param: str) -> None:
        """For a request without a grammar whose output the engine constrains all the same. Raises RequestError."""
        self._refuse_without_backend(param)
        try:
            await self._prepare()
        except GrammarError as error:
            raise RequestError(f"{param} is refused: {error}; remove it", code="not_implemented", param=param) from None

    def _refuse_without_backend(self, param: str) -> None:
        if self._settings.backend == GRAMMAR_OFF:
            raise RequestError(f"{param} is refused: {self._settings.why}", code="no_grammars", param=param)

    def _refuse_early(self, source: GrammarSource) -> None:
        self._refuse_without_backend(source.param)
        try:
            size = len(source.text[: MAX_SOURCE_BYTES + 1].encode())
        except UnicodeEncodeError:
            message = f"{source.param} is not valid Unicode: it has a lone surrogate"
            raise RequestError(message, code="invalid_text", param=source.param) from None
        if size > MAX_SOURCE_BYTES:
            raise RequestError(
                f"{source.param} has more than {MAX_SOURCE_BYTES} bytes; make it smaller",
                code="grammar_too_large",
                param=source.param,
            )

    def _evict(self) -> None:
        while len(self._checked) > 1 and (
            len(self._checked) > MAX_CACHED or sum(len(source.text) for source in self._checked) > MAX_CACHED_BYTES
        ):
            self._checked.popitem(last=False)

    async def _check(self, source: GrammarSource, owner: str) -> CheckedGrammar:
        try:
            async with self._queue.place(owner):
                await self._prepare()
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, source)
        except (Exception, asyncio.CancelledError) as error:
            if not _is_refusal(error):  # perhaps it goes well another time
                self._checked.pop(source, None)
                if self._closed:
                    raise RequestError(
                        "the server is shutting down and does not finish this request; retry later",
                        code="shutting_down",
                        status=503,
                    ) from None
            raise

    async def _prepare(self) -> None:
        """Once: send the engine the vocabulary, and make the processes ready to start. A failure is not remembered."""
        if self._prepared is None:
            self._prepared = asyncio.create_task(self._prepare_now())
        prepared = self._prepared
        try:
            await asyncio.shield(prepared)
        except (Exception, asyncio.CancelledError) as error:
            if prepared.done() and self._prepared is prepared and not _is_refusal(error):
                self._prepared = None
            raise

    async def _prepare_now(self) -> None:
        vocabulary = await asyncio.get_running_loop().run_in_executor(self._threads, self._text.vocabulary)
        if vocabulary is None:
            raise GrammarError("the tokens of this model's tokenizer have no bytes of their own, which grammars need")
        settings = self._settings
        setup = GrammarSetup(
            settings.backend,
            vocabulary,
            settings.vocab_size,
            settings.end_tokens,
            settings.whitespace_pattern,
            settings.no_whitespace,
            LIMITS.processor_seconds,
            LIMITS.memory_bytes,
        )
        encoded = msgspec.msgpack.encode(setup)
        self._send(vocabulary)
        for _ in range(PROCESSES):
            process = BoundedProcess(_MODULE, encoded, LIMITS, "compiles it", _refusal)
            self._all_processes.append(process)
            self._processes.put(process)

    def _work(self, source: GrammarSource) -> CheckedGrammar:
        """On a thread. There are as many processes as threads."""
        process = self._processes.get()
        try:
            reply = msgspec.msgpack.decode(process.ask(msgspec.msgpack.encode(source)), type=GrammarReply)
        except Lost as lost:
            raise (_NotChecked if lost.retry else GrammarError)(str(lost)) from None
        finally:
            self._processes.put(process)
        if reply.text is None:
            raise GrammarError(reply.refused)
        grammar = Grammar(reply.text, source.begins_after, reply.slow)
        return CheckedGrammar(grammar, self._checker(reply.text, source.begins_after), reply.left_out)

    def _checker(self, text: str, begins_after: str) -> Callable[[], AnswerCheck] | None:
        """Answers are checked as bytes, so that the check knows nothing of tokens and masks."""
        if self._bytes_backend is None:
            vocabulary = Vocabulary(bytes(range(256)), [1] * 256, [])
            self._bytes_backend = make(self._settings.backend, GrammarContext(vocabulary, 257, (256,)))
        try:
            matcher: Callable[[], Any] = self._bytes_backend.compile(text)
        except GrammarError:
            return None
        return lambda: AnswerCheck(matcher, begins_after)


def _accepts(matcher: Matcher, text: str) -> bool:
    return not text or matcher.accept(text.encode("utf-8", "replace"))


def _is_refusal(error: BaseException) -> bool:
    """Whether the grammar is at fault, so that it is refused again."""
    return isinstance(error, GrammarError) and not isinstance(error, _NotChecked)


def _retrieve(task: asyncio.Task[CheckedGrammar]) -> None:
    """Whoever asked may have left; its error is then nobody's."""
    if not task.cancelled():
        task.exception()


def _refusal(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=GrammarReply).refused
