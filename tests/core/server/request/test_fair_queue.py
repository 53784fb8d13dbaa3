"""The queue of grammars: owners take turns, and one that floods it does not refuse another."""

from __future__ import annotations

import asyncio
import threading

import pytest

from srv.errors import RequestError
from srv.grammar.source import GrammarSource
from srv.server.request.fair_queue import Crowded, FairQueue
from srv.server.request.grammars import MAX_WAITING, PROCESSES, CheckedGrammar, Grammars
from srv.server.settings import GrammarSettings
from srv.testing.fake_engine import ByteTokenizer
from srv.types import Grammar

pytestmark = pytest.mark.anyio


class Work:
    """Jobs in a queue, each of which holds its place until `end`."""

    def __init__(self, places: int, limit: int) -> None:
        self.queue, self.begun = FairQueue(places, limit), list[str]()
        self.ends: list[asyncio.Event] = []

    def start(self, owner: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(owner))

    async def _run(self, owner: str) -> None:
        async with self.queue.place(owner):
            self.begun.append(owner)
            end = asyncio.Event()
            self.ends.append(end)
            await end.wait()

    async def finish(self) -> None:
        self.ends.pop(0).set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_take_turns() -> None:
    work = Work(1, 8)
    tasks = [work.start(owner) for owner in "aaaabc"]
    await settle()
    for _ in tasks:
        await work.finish()
    assert work.begun == list("aabcaa")
    work.start("d")
    await settle()
    assert work.begun[-1] == "d"  # the place is free again
    await work.finish()


async def test_a_full_queue_takes_from_whoever_has_most() -> None:
    work = Work(1, 4)
    flood = [work.start("a") for _ in range(5)]
    await settle()
    with pytest.raises(Crowded, match="4 are waiting"):
        await work.start("a")
    others = [work.start(owner) for owner in "bc"]
    await settle()
    assert [task.done() for task in flood] == [False, False, False, True, True]
    with pytest.raises(Crowded):
        await flood[-1]
    with pytest.raises(Crowded, match="1 are waiting"):
        await work.start("b")  # it has 1 of 4, as a would have: no fairer
    for _ in range(5):
        await work.finish()
    assert all(task.done() and task.exception() is None for task in (*flood[:3], *others))


async def test_who_leaves_takes_no_turn() -> None:
    work = Work(1, 4)
    first, gone, last = (work.start(owner) for owner in "abc")
    await settle()
    gone.cancel()
    work.ends.pop().set()  # in the same turn of the event loop
    await settle()
    assert work.begun == ["a", "c"]
    late = work.start("d")
    await settle()
    work.queue.close()
    await settle()
    assert late.cancelled()
    await work.finish()
    assert first.done()
    assert last.done()


async def test_a_key_that_floods_refuses_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused itself; and who waits for the same grammar as the flood waits on as another key."""
    busy = threading.Event()

    async def prepare(grammars: Grammars) -> None:
        pass

    def work(grammars: Grammars, source: GrammarSource) -> CheckedGrammar:
        busy.wait(20)
        return CheckedGrammar(Grammar(source.text), None)

    monkeypatch.setattr(Grammars, "_prepare", prepare)
    monkeypatch.setattr(Grammars, "_work", work)
    grammars = Grammars(GrammarSettings("llguidance", "", 260, (257,)), ByteTokenizer(), lambda vocabulary: None)

    def ask(text: str, owner: str) -> asyncio.Task[CheckedGrammar]:
        source = GrammarSource(kind="regex", text=text, param="regex")
        return asyncio.create_task(grammars.check(source, owner))

    try:
        flood = [ask(f"a{number}", "flood") for number in range(PROCESSES + MAX_WAITING)]
        await settle()
        shared = ask(f"a{PROCESSES + MAX_WAITING - 1}", "other")  # the newest of the flood
        others = [ask(f"b{number}", "other") for number in range(3)]
        await settle()
        with pytest.raises(RequestError, match="other grammars of this key") as caught:
            await ask("one more", "flood")
        assert (caught.value.status, caught.value.code) == (503, "too_many_grammars")
        busy.set()
        assert (await shared).grammar.text == f"a{PROCESSES + MAX_WAITING - 1}"
        assert [(await other).grammar.text for other in others] == ["b0", "b1", "b2"]
        refused = [
            result
            for result in await asyncio.gather(*flood, return_exceptions=True)
            if isinstance(result, RequestError)
        ]
        assert [rejection.code for rejection in refused] == ["too_many_grammars"] * len(refused)
        assert 3 <= len(refused) <= 4
    finally:
        busy.set()
        grammars.close()
