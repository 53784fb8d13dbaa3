"""L2: captured steps of decode attention, replayed with other lengths, other rows and padding.

A captured step reads static buffers, as in the runner: a step copies its inputs into them, plans, and replays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, Graphs
from srv.testing.conformance.bench import Bench, Row
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.setups import MAX_HEAD_SIZES, Setup, dtype_of, select_setups

COUNTS = (4, 2)  # row counts of the captured steps, the largest first, as in the engine
COLUMNS = 12  # of the page table, for pages of at least `MIN_SPAN` tokens
LAYERS = (0, 1)


def declared(kit: Kit) -> str:
    """The capability is declared if and only if the platform implements graphs."""
    implemented, declares = kit.platform.graphs is not None, "graphs" in kit.capabilities
    if declares and not implemented:
        raise Fault("it declares the capability graphs, but Platform.graphs is None")
    if implemented and not declares:
        try:
            _run_each(kit, _check_other_lengths)
        except Exception as error:  # noqa: BLE001 - undeclared graphs may fail in any way
            return f"Platform.graphs is implemented but fails, and is not declared ({type(error).__name__})"
        raise Undeclared(
            "replayed steps are correct, but the plugin does not declare graphs",
            "Add graphs to the capabilities, so that the engine uses them.",
        )
    return "declared and implemented" if declares else "neither declared nor implemented"


def replay(kit: Kit) -> str:
    """A replayed step is correct for new inputs, with the lengths of the capture."""
    return _run_each(kit, _check_captured_lengths)


def lengths(kit: Kit) -> str:
    """A replay uses the lengths of its own step: they grow, cross page boundaries, and belong to other rows."""
    return _run_each(kit, _check_other_lengths)


def padding(kit: Kit) -> str:
    """Padded rows, which have page 0 and length 1, do not change the others."""
    return _run_each(kit, _check_padding)


def back_to_back(kit: Kit) -> str:
    """A replay may be launched while the previous one of the same captured step still runs."""
    return _run_each(kit, _check_back_to_back)


def row_counts(kit: Kit) -> str:
    """Captured steps with different row counts, replayed alternately."""
    return _run_each(kit, _check_row_counts)


class _Captured:
    """Decode steps of one backend, captured for each of `COUNTS`."""

    def __init__(self, kit: Kit, setup: Setup) -> None:
        graphs = kit.platform.graphs
        if graphs is None:
            raise NotApplicable("Platform.graphs is None")
        self.kit, self.graphs = kit, graphs
        self.bench = Bench(kit, setup)
        shape, dtype, rows = setup.shape, dtype_of(setup.dtype), max(COUNTS)
        self._q = torch.zeros(rows, shape.heads, shape.head_dim, dtype=dtype, device=kit.device)
        self._k = torch.zeros(rows, shape.kv_heads, shape.head_dim, dtype=dtype, device=kit.device)
        self._v = torch.zeros_like(self._k)
        self._out = torch.zeros(len(LAYERS), rows, shape.heads, shape.head_dim, dtype=dtype, device=kit.device)
        columns = COLUMNS * setup.span // setup.layout.page_size
        self._table = torch.zeros(rows, columns, dtype=torch.int32, device=kit.device)
        self._results = {count: self._capture(graphs, count) for count in COUNTS}

    def _capture(self, graphs: Graphs, count: int) -> Tensor:
        metadata = self._plan(count, [1] * count)
        out = self._out[:, :count]

        def run() -> Tensor:
            for index in LAYERS:
                q, k, v = (part[:count] for part in (self._q, self._k, self._v))
                out[index].copy_(self.bench.own.forward(self.bench.layers[index], q, k, v, metadata))
            return out

        output: object = graphs.capture(count, run)
        if not isinstance(output, Tensor) or output.shape != out.shape:
            raise Fault(f"capture returned {output!r}, not the output of the captured function")
        return output

    def _plan(self, count: int, lens: Sequence[int]) -> object:
        batch = AttentionBatch([1] * count, list(lens), self._table[:count], graph=count)
        planned: object = self.bench.own.plan(batch)
        return planned

    def step(self, rows: Sequence[Row], what: str, count: int = COUNTS[0]) -> None:
        """Compute one token per row by replaying the captured step of `count` rows; further rows are padding."""
        self.steps(rows, 1, what, count)

    def steps(self, rows: Sequence[Row], number: int, what: str, count: int = COUNTS[0]) -> None:
        """Launch `number` such steps without waiting between them, and then compare all results."""
        bench, used = self.bench, len(rows)
        pairs = [(row, 1) for row in rows]
        prepared = []
        for _ in range(number):  # copies to the device come first, because a copy may wait for a running replay
            inputs = bench.inputs(used)
            prepared.append((bench.batch(pairs), inputs, [part.to(self.kit.device) for part in inputs]))
            for row in rows:
                row.length += 1
        results = [self._replay(batch, moved, count) for batch, _, moved in prepared]
        self.kit.synchronize()
        for (_, inputs, _), result in zip(prepared, results, strict=True):
            for index, got in zip(LAYERS, result.to("cpu"), strict=True):
                bench.compare(pairs, index, inputs, got[:used], what)

    def _replay(self, batch: AttentionBatch, inputs: Sequence[Tensor], count: int) -> Tensor:
        used = len(batch.kv_lens)
        self._table.zero_()
        self._table[:used, : batch.page_table.shape[1]].copy_(batch.page_table)
        for static, part in zip((self._q, self._k, self._v), inputs, strict=True):
            static.zero_()
            static[:used].copy_(part)
        self.graphs.replay(count, [self._plan(count, [*batch.kv_lens, *([1] * (count - used))])])
        return self._results[count].clone()

    def prompts(self, lens: Sequence[int]) -> list[Row]:
        """Rows whose prompts were computed eagerly."""
        rows = [self.bench.sequence() for _ in lens]
        self.bench.step(list(zip(rows, lens, strict=True)), "eager prompts", layers=LAYERS)
        return rows


def _check_captured_lengths(kit: Kit, setup: Setup) -> None:
    captured = _Captured(kit, setup)
    for _ in range(3):
        captured.step([captured.bench.sequence() for _ in range(COUNTS[0])], "replay at the captured lengths")


def _check_other_lengths(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([1, size - 1, size, 2 * size + 3])
    for _ in range(3):
        captured.step(rows, "replay with grown lengths")
    others = captured.prompts([3 * size + 1, 2, size + 1, 5])
    captured.step(others, "replay with the lengths of other rows")
    captured.step([rows[3], others[0], rows[0], others[1]], "replay with rows in another order")


def _check_padding(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([size + 2, 3, 2 * size])
    for used in (3, 1, 2, 3):
        captured.step(rows[:used], f"replay of {COUNTS[0]} rows with {used} requests")


def _check_back_to_back(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([size - 1, 2, size, 1])
    captured.steps(rows, 3, "replay while the previous one runs")


def _check_row_counts(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([4, size + 1, 2, size])
    for count, _ in itertools.product(COUNTS, range(2)):
        captured.step(rows[:count], f"replay of {count} rows", count)
        captured.step(rows[:2], "replay of two rows", 2)


def _run_each(kit: Kit, check: Callable[[Kit, Setup], None]) -> str:
    setups = select_setups(kit, max_page_sizes=1, max_head_sizes=MAX_HEAD_SIZES, captured=True)
    chosen = [setup for setup in setups if setup.decodes]
    for setup in chosen:
        check(kit, setup)
    return "; ".join(str(setup) for setup in chosen)
