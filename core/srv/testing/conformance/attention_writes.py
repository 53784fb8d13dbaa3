"""L2: where steps of attention store keys and values. The pool is compared on the host; results are not looked at.

If this check fails, those of attention still judge reading: their bench stores keys and values itself
(`srv.testing.conformance.bench`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv.testing.conformance import stored
from srv.testing.conformance.attention import run_each
from srv.testing.conformance.bench import TOLERANCES, Bench, BenchRow
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.setups import MAX_HEAD_SIZES, AttentionSetup, select_setups


def writes(kit: Kit) -> str:
    """Every step stores its keys and values in the slots of its tokens, and changes nothing else but page 0."""
    setups = select_setups(kit, max_head_sizes=MAX_HEAD_SIZES)
    plain = tuple(setup for setup in setups if stored.is_plain(setup.layout))
    own_orders = {setup.layout.order for setup in setups} - {setup.layout.order for setup in plain}
    unknown = (
        f"the kit cannot read pools of the platform's own layout {', '.join(sorted(own_orders))}" if own_orders else ""
    )
    if not plain:
        raise NotApplicable(f"{unknown}; the other checks judge writing together with reading")
    faults: list[str] = []

    def check(setup: AttentionSetup) -> None:
        fault = _Writer(kit, setup).fault()
        if fault:
            kit.wrong_writers.add(setup.name)
            faults.append(fault)

    summary = run_each(plain, check)
    if faults:
        raise Fault(f"writing keys and values is at fault: {faults[0]}")
    return "; ".join(filter(None, (summary, unknown)))


class _Writer:
    """Steps of one backend, and what its pool should hold after each: keys and values on the host, by slots."""

    def __init__(self, kit: Kit, setup: AttentionSetup) -> None:
        self._chunked = "chunked_prefill" in kit.capabilities
        self._setup, self._bench = setup, Bench(kit, setup)
        self._expected = stored.on_host(self._bench.kv, 0)

    def fault(self) -> str:
        """What the first wrong step did, as a clause; empty if there is none."""
        size, new = self._setup.span, self._bench.sequence
        lengths = (1, size - 1, size, size + 1, 2 * size + 3)
        rows = [new() for _ in lengths]
        steps = [
            ("prompts", list(zip(rows, lengths, strict=True))),
            ("output", [(row, 1) for row in rows]),
            ("output in another order", [(row, 1) for row in reversed(rows)]),
            ("a prompt and output", [(rows[4], 1), (new(), size + 2), (rows[0], 1)]),
            *([("a chunk of a prompt and output", [(rows[1], size + 3), (rows[2], 1)])] if self._chunked else []),
        ]
        return next(filter(None, (self._step(what, step) for what, step in steps)), "")

    def _step(self, what: str, rows: Sequence[tuple[BenchRow, int]]) -> str:
        bench = self._bench
        q, k, v = bench.inputs(sum(count for _, count in rows))
        metadata = bench.backend.plan(bench.batch(rows))
        bench.expect(rows, 0, k, v)
        bench.forward(bench.layers[0], q, k, v, metadata)
        places: dict[int, str] = {}
        for number, (row, count) in enumerate(rows):
            slots = stored.slots(row.pages, bench.page_size, row.length + count)[row.length :]
            for expected, part in zip(self._expected, (row.keys[0], row.values[0]), strict=True):
                expected[slots] = part[row.length :].to(expected.dtype)
            backend = self._setup.computing(count)
            for token, slot in enumerate(slots.tolist(), row.length):
                places[slot] = f"token {token} of row {number} ({count} queries, {backend})"
            row.length += count
        for name, actual, want in zip(("key", "value"), stored.on_host(bench.kv, 0), self._expected, strict=True):
            wrong = self._wrong_slots(actual, want)
            if wrong:
                slot = min(wrong, key=lambda wrong_slot: wrong_slot not in places)
                place = f"page {slot // bench.page_size}, slot {slot % bench.page_size}"
                if slot in places:
                    return f"{what}: {place} does not hold the {name} of {places[slot]}"
                return f"{what}: {place} holds another {name}, though no token of the step belongs there: {self._setup}"
        return ""

    def _wrong_slots(self, actual: Tensor, want: Tensor) -> list[int]:
        absolute, relative = TOLERANCES[self._setup.dtype]
        error = (actual.double() - want.double()).abs()
        is_close = (error <= absolute + relative * want.double().abs()).flatten(1).all(1)
        is_close[: self._bench.page_size] = True  # page 0
        return torch.nonzero(~is_close).flatten().tolist()
