"""L2: hundreds of steps leave nothing behind: no memory of the device, and no objects of the host, such as events."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable

from srv.testing.conformance.attention import run_each
from srv.testing.conformance.bench import Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.pool import free_bytes
from srv.testing.conformance.setups import Setup, select_setups

STEPS, MIN_STEPS = 500, 20
SECONDS = 4.0  # for the steps of one backend, beyond `MIN_STEPS`
_WARM_UP = 10
_ATTEMPTS = 3  # other processes may allocate meanwhile; what is left behind shows every time
_BYTES = 8 << 20  # that caches of an allocator may take


def kept(kit: Kit) -> str:
    """Steps with copies in both directions, as in an engine: neither memory nor objects grow with their number."""
    counts: list[int] = []

    def check(setup: Setup) -> None:
        step = _step(kit, Bench(kit, setup))
        for _ in range(_WARM_UP):
            step()
        for attempt in range(_ATTEMPTS):
            fault, count = _grown(kit, step)
            counts.append(count)
            if not fault:
                return
            if attempt == _ATTEMPTS - 1:
                raise Fault(f"{setup}: {fault}")

    seen = run_each(select_setups(kit, max_page_sizes=1), check)
    return f"{min(counts)} steps or more: {seen}"


def _step(kit: Kit, bench: Bench) -> Callable[[], None]:
    """A step that computes two rows of the bench, of always the same lengths."""
    query_len = 2 if bench.setup.role == "prefill" else 1
    rows = [(bench.sequence(), query_len) for _ in range(2)]
    batch, (q, *_) = bench.batch(rows), bench.inputs(2 * query_len)
    shape = bench.setup.shape

    def step() -> None:
        transfers = kit.transfers
        transfers.begin()
        queries = transfers.upload(q)
        keys = queries[:, : shape.kv_heads].contiguous()
        result = bench.own.forward(bench.layers[0], queries, keys, keys, bench.own.plan(batch))
        transfers.download(result)
        copies = transfers.end()
        copies.wait()
        copies.release()

    return step


def _grown(kit: Kit, step: Callable[[], None]) -> tuple[str, int]:
    """What the steps left behind, as a clause, or nothing; and how many there were."""
    before, objects = free_bytes(kit), _objects()
    count, started = 0, time.monotonic()
    while count < MIN_STEPS or (count < STEPS and time.monotonic() - started < SECONDS):
        step()
        count += 1
    lost, more = before - free_bytes(kit), _objects() - objects
    kinds = [kind for kind, number in more.most_common() if number >= count // 2]
    if kinds:  # the plugin's own types say more than those of Python
        kind = next((each for each in kinds if not each.startswith("builtins.")), kinds[0])
        return f"{count} steps left {more[kind]} objects behind, of the type {kind}", count
    return (f"{count} steps left {lost} bytes behind" if lost > _BYTES else ""), count


def _objects() -> Counter[str]:
    """The objects that the collector of Python knows, by type."""
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
