"""Structured output in the engine: it holds requests back until their grammars are compiled, and makes their masks.

    loop    admit(request) ── compiled? ──► scheduler                       make(rows): tokens since the last mask go
              └── no ──► a thread compiles ──► ready() ──► scheduler        into each matcher; masks of all rows at once

A request whose grammar is being compiled is not ready: it is not in the scheduler's queue, and blocks nobody. The API
process has compiled the same grammar within its limits before, so that this is short. The state of an output is a
function of its tokens, so a retracted request goes on where it was. `srv.grammar.ahead` makes the masks, and finds the
tokens that they force. An output whose masks are slow waits for a thread that makes them (`prepare`), so that no step
does; that of a grammar known to be slow does so before its first row. Must not know scheduling or devices.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from srv.errors import GrammarError
from srv.grammar.ahead import Progress, next_masks
from srv.grammar.backend import GrammarBackend, GrammarContext, error_clause, token_bytes
from srv.grammar.registry import make
from srv.io.messages import Output
from srv.sched.late import LateInputs, LateRow
from srv.types import Grammar, RequestSpec, SamplingParams, Vocabulary

logger = logging.getLogger(__name__)

MAX_CACHED = 128  # compiled grammars of requests that have ended
MAX_CACHED_BYTES = 16 * 2**20  # of their texts, which their sizes follow
_THREADS = 2
_FAILED = "grammar_failed"

NewMatcher = Callable[[], Any]


class _State:
    """One output. `progress` is None until the grammar begins."""

    __slots__ = ("begins_after", "consumed", "jumps", "prepared", "progress", "slow", "tail")

    def __init__(self, request: RequestSpec, grammar: Grammar) -> None:
        self.begins_after = grammar.begins_after.encode()
        self.jumps, self.slow = may_jump(request), grammar.slow
        self.progress: Progress | None = None
        self.consumed = 0  # tokens of the output that it contains
        self.tail = b""  # the end of the text before the grammar
        self.prepared: Future[None] | None = None  # its mask is made on a thread, to which the state belongs until then


def _failed(row: LateRow, output: Progress) -> str:
    reason = error_clause(output.failure)
    logger.warning("request %s: its grammar cannot go on (%s); it ends with an error", row.request.id, reason)
    return f"the grammar cannot go on after {len(row.output)} tokens of the output: {reason}; use a smaller grammar"


def may_jump(request: RequestSpec) -> bool:
    """Whether forced tokens need not be sampled. Log-probabilities are those of sampled tokens, and a custom processor
    is called for each of them.
    """
    params = request.params
    return isinstance(params, SamplingParams) and params.logprobs is None and not params.custom_processor


class Grammars:
    """The grammars of one engine: a `LateInputMaker`, and the gate before the scheduler.

    `name`: of the backend. `vocab_size`: the width of the logits. `end_tokens`: of the model.
    """

    def __init__(self, name: str, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        self._name, self._vocab_size, self._end_tokens = name, vocab_size, end_tokens
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="srv-grammar")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="srv-mask")
        self._backend: Future[GrammarBackend] | None = None
        self._bytes: Future[list[bytes]] | None = None  # of each token
        self._compiled: OrderedDict[str, Future[NewMatcher]] = OrderedDict()
        self._held: dict[str, RequestSpec] = {}
        self._states: dict[str, tuple[_State, Future[NewMatcher]]] = {}

    # ---- the gate

    @property
    def held(self) -> int:
        """Requests that wait for their grammars, or for the first masks of slow ones."""
        return len(self._held)

    def learn(self, vocabulary: Vocabulary) -> None:
        """The vocabulary, which comes before the first request with a grammar."""
        if self._backend is None:
            context = GrammarContext(vocabulary, self._vocab_size, self._end_tokens)
            self._backend = self._threads.submit(make, self._name, context)
            self._bytes = self._threads.submit(token_bytes, vocabulary, self._vocab_size)

    def admit(self, request: RequestSpec) -> bool:
        """Whether the request is ready. If it is not, `ready` returns it later."""
        if request.grammar is None:
            return True
        compiled = self._compile(request.grammar.text)
        self._states[request.id] = (_State(request, request.grammar), compiled)
        if compiled.done() and compiled.exception() is None and not request.grammar.slow:
            return True
        self._held[request.id] = request
        return False

    def ready(self) -> list[tuple[RequestSpec, str]]:
        """The held requests that are ready now, each with the reason why it cannot be served ("": it can)."""
        found: list[tuple[RequestSpec, str]] = []
        for name in [name for name in self._held if self._is_ready(name)]:
            error = self._states[name][1].exception()
            found.append((self._held.pop(name), "" if error is None else str(error)))
        return found

    def _is_ready(self, name: str) -> bool:
        state, compiled = self._states[name]
        if not compiled.done() or compiled.exception() is not None or not state.slow:
            return compiled.done()
        return self._prepared(state, compiled, ())

    def drop(self, names: Sequence[str] | None) -> list[str]:
        """Forget held requests (None: all). Returns their names."""
        dropped = [name for name in (list(self._held) if names is None else names) if name in self._held]
        for name in dropped:
            del self._held[name]
            self.forget(name)
        return dropped

    def forget(self, name: str) -> None:
        """The request has ended."""
        self._states.pop(name, None)

    def forget_ended(self, outputs: Sequence[Output]) -> None:
        """Forget the requests of which these are the last outputs."""
        if not self._states:
            return
        for output in outputs:
            if output.finish is not None:
                self.forget(output.request)

    def _compile(self, text: str) -> Future[NewMatcher]:
        found = self._compiled.get(text)
        if found is None:
            found = self._compiled[text] = self._threads.submit(self._compile_now, text)
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_CACHED or sum(map(len, self._compiled)) > MAX_CACHED_BYTES
            ):
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return found

    def _compile_now(self, text: str) -> NewMatcher:
        if self._backend is None:
            raise GrammarError("the vocabulary is missing")
        return self._backend.result().compile(text)

    def bytes_of(self, token: int) -> bytes:
        """Those of a token id; none without a vocabulary."""
        known = [] if self._bytes is None else self._bytes.result()
        return known[token] if token < len(known) else b""

    # ---- late inputs

    def concerns(self, request: RequestSpec) -> bool:
        return request.grammar is not None

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        """One mask per row whose grammar has begun. See `srv.sched.late.LateInputMaker`."""
        found = [(row, self._advance(row)) for row in rows]
        begun = [(row, output) for row, output in found if output is not None]
        if not begun:
            return LateInputs(slow=self._slow_rows(found))
        assert self._backend is not None
        backend = self._backend.result()
        masks = next_masks(backend, [output for _, output in begun], self._end_tokens)
        slow = self._slow_rows(found)
        return LateInputs(
            tuple([(row.slot, mask.tobytes()) for (row, _), mask in zip(begun, masks, strict=True)]),
            tuple([(row.slot, tuple(output.ahead)) for row, output in begun if len(output.ahead) > 1]),
            tuple([(row.request.id, _FAILED, _failed(row, output)) for row, output in begun if output.failure]),
            slow=slow,
        )

    def _slow_rows(self, rows: Sequence[tuple[LateRow, Progress | None]]) -> tuple[str, ...]:
        """The requests whose next masks may be slow, also where the grammar begins with the next token."""
        return tuple(
            [
                row.request.id
                for row, output in rows
                if (self._states[row.request.id][0].slow if output is None else output.time.slow)
            ]
        )

    def prepare(self, row: LateRow) -> bool:
        """Whether the mask that follows this output is ready. If it is not, a thread makes it."""
        if row.request.id not in self._states:
            return True
        state, compiled = self._states[row.request.id]
        return self._prepared(state, compiled, row.output)

    def _prepared(self, state: _State, compiled: Future[NewMatcher], tokens: Sequence[int]) -> bool:
        if state.prepared is None:
            state.prepared = self._slow.submit(self._prepare, state, compiled, list(tokens))
        return state.prepared.done()

    def _prepare(self, state: _State, compiled: Future[NewMatcher], tokens: Sequence[int]) -> None:
        output = self._follow(state, compiled, tokens)
        if output is not None and self._backend is not None:
            backend = self._backend.result()
            output.remember(next_masks(backend, [output], self._end_tokens)[0])

    def _advance(self, row: LateRow) -> Progress | None:
        """The progress of a row after all its tokens; None before the grammar begins."""
        if row.request.id not in self._states:  # a second request of this name, which was refused, took it along
            assert row.request.grammar is not None
            state = _State(row.request, row.request.grammar)
            self._states[row.request.id] = (state, self._compile(row.request.grammar.text))
        state, compiled = self._states[row.request.id]
        if state.prepared is not None:  # the thread may still have it if the output was retracted
            state.prepared.result()
            state.prepared = None
        return self._follow(state, compiled, row.output)

    def _follow(self, state: _State, compiled: Future[NewMatcher], tokens: Sequence[int]) -> Progress | None:
        new = tokens[state.consumed :]
        state.consumed = len(tokens)
        if state.progress is None:
            rest = self._begin(state, new)
            if rest is None:
                return None
            new_matcher = compiled.result()
            progress = Progress(new_matcher(), jumps=state.jumps, grammar=new_matcher, slow=state.slow)
            state.progress, new = progress, rest
        if new:
            state.progress.accept(new)
        return state.progress

    def _begin(self, state: _State, new: Sequence[int]) -> list[int] | None:
        """The tokens of the grammar, if it has begun: those after the token with the end of `begins_after`."""
        if not state.begins_after:
            return list(new)
        for index, token in enumerate(new):
            state.tail += self.bytes_of(token)
            if state.begins_after in state.tail:
                return list(new[index + 1 :])
            state.tail = state.tail[-len(state.begins_after) :]
        return None
