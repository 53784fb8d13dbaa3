"""The process that checks grammars: what it lets pass does not crash the threads that compile it after it."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator

import msgspec
import pytest

from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.child import GrammarReply, GrammarSetup, _check
from srv.grammar.llguidance_backend import make_backend
from srv.grammar.source import GrammarSource
from srv.io.bounded_process import BoundedProcess, Lost, WorkLimits
from srv.types import Vocabulary

VOCABULARY = Vocabulary(bytes(range(256)), [1] * 256, [])
LIMITS = WorkLimits(processor_seconds=10, seconds=100, memory_bytes=2**30)


@pytest.fixture
def unlimited_stack() -> Iterator[None]:
    """New processes have main threads with any stack, and other threads with 2 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("needs a hard limit on stacks (ulimit -Hs) that is unlimited")
    resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def chain(rules: int) -> str:
    names = "\n".join(f'r{number}: "a" r{number + 1} | "b"' for number in range(rules))
    return f'start: r0\n{names}\nr{rules}: "c"\n'


@pytest.mark.usefixtures("unlimited_stack")
def test_what_passes_fits_the_stack_of_a_thread() -> None:
    setup = GrammarSetup(
        "llguidance", VOCABULARY, 257, (256,), None, False, LIMITS.processor_seconds, LIMITS.memory_bytes
    )
    process = BoundedProcess("srv.grammar.child", msgspec.msgpack.encode(setup), LIMITS, "compiles it", lambda _: "")
    passed: dict[int, str] = {}
    for rules in (300, 1500, 30):
        source = GrammarSource(kind="grammar", text=chain(rules), param="test")
        question = msgspec.msgpack.encode(source)
        if rules == 1500:
            with pytest.raises(Lost, match="nested too deeply") as lost:
                process.ask(question)
            assert not lost.value.retry
        else:
            passed[rules] = msgspec.msgpack.decode(process.ask(question), type=GrammarReply).text or ""
    process.close()
    backend, compiled = make_backend(GrammarContext(VOCABULARY, 257, (256,))), []
    threading.stack_size(2 * 2**20)
    thread = threading.Thread(target=lambda: compiled.extend([backend.compile(text) for text in passed.values()]))
    thread.start()
    thread.join()
    threading.stack_size(0)
    assert len(compiled) == 2


def test_a_fault_of_a_check_refuses_one_request() -> None:
    class Faulty:
        def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
            raise OverflowError("int too large")

    source = msgspec.msgpack.encode(GrammarSource(kind="regex", text="a", param="test"))
    reply = _check(Faulty(), JsonSpacing(), (256,), source)  # type: ignore[arg-type]
    assert reply.refused == "it cannot be checked: OverflowError: int too large"


def test_what_a_source_lacks_is_named_in_the_reply() -> None:
    setup = GrammarSetup(
        "llguidance", VOCABULARY, 257, (256,), None, False, LIMITS.processor_seconds, LIMITS.memory_bytes
    )
    process = BoundedProcess("srv.grammar.child", msgspec.msgpack.encode(setup), LIMITS, "compiles it", lambda _: "")
    schema = '{"type": "array", "uniqueItems": true, "maxItems": 3}'
    source = GrammarSource(kind="json_schema", text=schema, param="test", strict=False, left_out=("pattern",))
    try:
        reply = msgspec.msgpack.decode(process.ask(msgspec.msgpack.encode(source)), type=GrammarReply)
    finally:
        process.close()
    assert reply.left_out == ("pattern", "uniqueItems")
