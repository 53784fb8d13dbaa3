"""L2: hundreds of steps leave nothing behind: no memory of the device, and no objects of the host, such as events.

The steps have always the same lengths, or longer rows every time, or are replayed from a captured one.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from srv.platform.interface import AttentionBatch, GraphKey
from srv.testing.conformance.attention import run_each
from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.pool import free_bytes
from srv.testing.conformance.setups import AttentionSetup, select_setups

STEPS, MIN_STEPS = 500, 48  # so few on slow devices; a leak of 256 KiB a step shows in them
SECONDS = 4.0  # for the steps of one backend, beyond `MIN_STEPS`
GROWING = 100  # steps with longer rows each time, and replays
_WARM_UP = 10
_ATTEMPTS = 3  # other processes may allocate meanwhile; what is left behind shows every time
_BYTES = 8 << 20  # that caches of an allocator may take


def kept(kit: Kit) -> str:
    """Steps with copies in both directions, as in an engine: neither memory nor objects grow with their number."""
    counts: list[int] = []

    def check(setup: AttentionSetup) -> None:
        counts.append(_check_kept(kit, setup, _step(kit, Bench(kit, setup)), STEPS))
        _check_kept(kit, setup, _growing_step(kit, Bench(kit, setup)), GROWING, " with longer rows each time")

    summary = run_each(select_setups(kit, max_page_sizes=1), check)
    return f"{min(counts)} steps or more: {summary}"


def replays(kit: Kit) -> str:
    """The same of replays of a captured step."""

    def check(setup: AttentionSetup) -> None:
        _check_kept(kit, setup, _Replays(kit, Bench(kit, setup)), GROWING, " of a captured step")

    setups = select_setups(kit, max_page_sizes=1, captured=True)
    return f"{GROWING} replays: {run_each(tuple(setup for setup in setups if setup.decodes), check)}"


def _check_kept(kit: Kit, setup: AttentionSetup, step: Callable[[], None], number: int, what: str = "") -> int:
    """The number of steps. Fault if they leave something behind at every attempt."""
    for _ in range(_WARM_UP):
        step()
    for _ in range(_ATTEMPTS):
        fault, count = _grown(kit, step, number)
        if not fault:
            return count
    raise Fault(f"{setup}: {count} steps{what} {fault}")


class _Replays:
    """A captured step of one row, which is replayed with other lengths from one to the next.

    What the captured step reads and writes lives as long as this object.
    """

    def __init__(self, kit: Kit, bench: Bench) -> None:
        graphs, shape = kit.platform.graphs, bench.setup.shape
        assert graphs is not None  # see graph.declared
        self._kit, self._graphs, self._bench = kit, graphs, bench
        self._table = bench.batch([(bench.sequence(), bench.setup.span)]).page_table
        self._lengths = itertools.cycle(range(1, bench.setup.span + 1))
        self._inputs = [part.to(kit.device) for part in bench.inputs(1)]
        self._out = torch.zeros(1, shape.heads, shape.head_dim, dtype=self._inputs[0].dtype, device=kit.device)
        with torch.inference_mode():
            self._metadata = self._plan()
            graphs.capture(GraphKey("decode", 1), self._compute)

    def _plan(self) -> Any:
        return self._bench.own.plan(AttentionBatch([1], [next(self._lengths)], self._table, graph=1))

    def _compute(self) -> torch.Tensor:
        q, k, v = self._inputs
        return self._out.copy_(self._bench.own.forward(self._bench.layers[0], q, k, v, self._metadata))

    def __call__(self) -> None:
        with torch.inference_mode():
            self._graphs.replay(GraphKey("decode", 1), [self._plan()])
        self._kit.synchronize()


def _growing_step(kit: Kit, bench: Bench) -> Callable[[], None]:
    """The step with rows that have one more token every time; what a new row would hold does not matter here."""
    query_len = 2 if bench.setup.role == "prefill" else 1
    longest = min(query_len + _WARM_UP + _ATTEMPTS * GROWING, (PAGES - 1) * bench.page_size)
    whole, lengths = bench.batch([(bench.sequence(), longest)] * 2), itertools.count(query_len)

    def batch() -> AttentionBatch:
        length = min(next(lengths), longest)
        return dataclasses.replace(whole, query_lens=[query_len] * 2, kv_lens=[length] * 2)

    return _step(kit, bench, batch, query_len)


def _fixed(bench: Bench) -> tuple[Callable[[], AttentionBatch], int]:
    query_len = 2 if bench.setup.role == "prefill" else 1
    batch = bench.batch([(bench.sequence(), query_len) for _ in range(2)])
    return lambda: batch, query_len


def _step(
    kit: Kit, bench: Bench, make: Callable[[], AttentionBatch] | None = None, query_len: int = 0
) -> Callable[[], None]:
    """A step that computes two rows of the bench: of always the same lengths, or those of `make`."""
    if make is None:
        make, query_len = _fixed(bench)
    (q, *_), shape = bench.inputs(2 * query_len), bench.setup.shape

    def step() -> None:
        transfers = kit.transfers
        transfers.begin()
        queries = transfers.upload(q)
        keys = queries[:, : shape.kv_heads].contiguous()
        result = bench.own.forward(bench.layers[0], queries, keys, keys, bench.own.plan(make()))
        transfers.download(result)
        copies = transfers.end()
        copies.wait()
        copies.release()

    return step


def _grown(kit: Kit, step: Callable[[], None], number: int) -> tuple[str, int]:
    """What the steps left behind, as a clause, or nothing; and how many there were."""
    before, objects = free_bytes(kit), _objects()
    count, started = 0, time.monotonic()
    while count < MIN_STEPS or (count < number and time.monotonic() - started < SECONDS):
        step()
        count += 1
    lost, more = before - free_bytes(kit), _objects() - objects
    kinds = [kind for kind, instances in more.most_common() if instances >= count // 2]
    if kinds:  # the plugin's own types say more than those of Python
        kind = next((candidate for candidate in kinds if not candidate.startswith("builtins.")), kinds[0])
        return f"left {more[kind]} objects behind, of the type {kind}", count
    return (f"left {lost} bytes behind" if lost > _BYTES else ""), count


def _objects() -> Counter[str]:
    """The objects that the collector of Python knows, by type."""
    gc.collect()
    return Counter(f"{type(instance).__module__}.{type(instance).__qualname__}" for instance in gc.get_objects())
