"""L2: captured steps of decode attention, replayed with other lengths, other rows and padding, against the reference.

The buffers that a captured step reads are static, as the runner's are; a step copies into them, plans, and replays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from srv.platform.contract import graphs_of
from srv.platform.interface import AttentionBatch, Graphs
from srv.testing.conformance.bench import Bench, Row
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.setups import HEAD_SIZES, Setup, dtype_of, some_setups

COUNTS = (4, 2)  # rows of the captured steps, the largest first, as the engine captures them
COLUMNS = 12
LAYERS = (0, 1)


def declared(kit: Kit) -> str:
    """The capability and the platform's member say the same."""
    there, said = graphs_of(kit.platform) is not None, "graphs" in kit.capabilities
    if said and not there:
        raise Fault("it declares the capability graphs, but Platform.graphs is None")
    if there and not said:
        try:
            _each(kit, _grow)
        except Exception as error:  # noqa: BLE001 - it is not declared, so it may fail in any way
            return f"Platform.graphs is there, not declared, and not right ({type(error).__name__})"
        raise Undeclared(
            "captured steps replay rightly, and the plugin does not declare them",
            "Add graphs to the capabilities, so that the engine uses them.",
        )
    return "declared, and there" if said else "not declared, and not there"


def replay(kit: Kit) -> str:
    """A captured step gives what is right for new inputs, at the lengths with which it was captured."""
    return _each(kit, _same_lengths)


def lengths(kit: Kit) -> str:
    """A replay uses the lengths of its own step: they grow, cross pages, and belong to other rows."""
    return _each(kit, _grow)


def padding(kit: Kit) -> str:
    """Rows without a request, of page 0 and length 1, change nothing of the others."""
    return _each(kit, _padded)


def unwaited(kit: Kit) -> str:
    """A replay may be asked for while the last one of the same captured step still runs."""
    return _each(kit, _at_once)


def counts(kit: Kit) -> str:
    """Captured steps of several row counts, replayed in turn."""
    return _each(kit, _in_turn)


class _Captured:
    """Decode steps of the bench's backend, captured for each of `COUNTS`."""

    def __init__(self, kit: Kit, setup: Setup) -> None:
        graphs = graphs_of(kit.platform)
        if graphs is None:
            raise NotApplicable("Platform.graphs is None")
        self.kit, self.graphs = kit, graphs
        self.bench = Bench(kit, setup)
        shape, dtype, most = setup.shape, dtype_of(setup.dtype), max(COUNTS)
        self._q = torch.zeros(most, shape.heads, shape.head_dim, dtype=dtype, device=kit.device)
        self._k = torch.zeros(most, shape.kv_heads, shape.head_dim, dtype=dtype, device=kit.device)
        self._v = torch.zeros_like(self._k)
        self._out = torch.zeros(len(LAYERS), most, shape.heads, shape.head_dim, dtype=dtype, device=kit.device)
        self._table = torch.zeros(most, COLUMNS, dtype=torch.int32, device=kit.device)
        self._results = {count: self._capture(graphs, count) for count in COUNTS}

    def _capture(self, graphs: Graphs, count: int) -> Tensor:
        metadata = self._plan(count, [1] * count)
        out = self._out[:, :count]

        def run() -> Tensor:
            for index in LAYERS:
                q, k, v = (part[:count] for part in (self._q, self._k, self._v))
                out[index].copy_(self.bench.backend.forward(self.bench.layers[index], q, k, v, metadata))
            return out

        given: object = graphs.capture(count, run)
        if not isinstance(given, Tensor) or given.shape != out.shape:
            raise Fault(f"capture gave {given!r}, not the output of what it recorded")
        return given

    def _plan(self, count: int, lens: Sequence[int]) -> object:
        batch = AttentionBatch([1] * count, list(lens), self._table[:count], graph=count)
        planned: object = self.bench.backend.plan(batch)
        return planned

    def step(self, rows: Sequence[Row], what: str, count: int = COUNTS[0]) -> None:
        """One token of each row by replaying the captured step of `count` rows; what is left of them is padding."""
        self.steps(rows, 1, what, count)

    def steps(self, rows: Sequence[Row], number: int, what: str, count: int = COUNTS[0]) -> None:
        """So many of these steps, one after the other without waiting for any, all compared in the end."""
        bench, used = self.bench, len(rows)
        pairs = [(row, 1) for row in rows]
        prepared = []
        for _ in range(number):  # all that crosses to the device, first: a copy may wait for what runs
            given = bench.inputs(used)
            prepared.append((bench.batch(pairs), given, [part.to(self.kit.device) for part in given]))
            for row in rows:
                row.length += 1
        results = [self._replay(batch, moved, count) for batch, _, moved in prepared]
        self.kit.platform.record_event(self.kit.device).synchronize()
        for (_, given, _), result in zip(prepared, results, strict=True):
            for index, got in zip(LAYERS, result.to("cpu"), strict=True):
                bench.compare(pairs, index, given, got[:used], what)

    def _replay(self, batch: AttentionBatch, inputs: Sequence[Tensor], count: int) -> Tensor:
        used = len(batch.kv_lens)
        self._table.zero_()
        self._table[:used, : batch.page_table.shape[1]].copy_(batch.page_table)
        for static, part in zip((self._q, self._k, self._v), inputs, strict=True):
            static.zero_()
            static[:used].copy_(part)
        self.graphs.replay(count, self._plan(count, [*batch.kv_lens, *([1] * (count - used))]))
        return self._results[count].clone()

    def prompts(self, lens: Sequence[int]) -> list[Row]:
        """Rows whose prompts were computed eager."""
        rows = [self.bench.sequence() for _ in lens]
        self.bench.step(list(zip(rows, lens, strict=True)), "eager prompts", layers=LAYERS)
        return rows


def _same_lengths(kit: Kit, setup: Setup) -> None:
    captured = _Captured(kit, setup)
    for _ in range(3):
        captured.step([captured.bench.sequence() for _ in range(COUNTS[0])], "replay at the captured lengths")


def _grow(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.layout.page_size
    rows = captured.prompts([1, size - 1, size, 2 * size + 3])
    for _ in range(3):
        captured.step(rows, "replay with grown lengths")
    others = captured.prompts([3 * size + 1, 2, size + 1, 5])
    captured.step(others, "replay with the lengths of other rows")
    captured.step([rows[3], others[0], rows[0], others[1]], "replay with rows in another order")


def _padded(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.layout.page_size
    rows = captured.prompts([size + 2, 3, 2 * size])
    for used in (3, 1, 2, 3):
        captured.step(rows[:used], f"replay of {COUNTS[0]} rows with {used} requests")


def _at_once(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.layout.page_size
    rows = captured.prompts([size - 1, 2, size, 1])
    captured.steps(rows, 3, "replay while the last one runs")


def _in_turn(kit: Kit, setup: Setup) -> None:
    captured, size = _Captured(kit, setup), setup.layout.page_size
    rows = captured.prompts([4, size + 1, 2, size])
    for count, _ in itertools.product(COUNTS, range(2)):
        captured.step(rows[:count], f"replay of {count} rows", count)
        captured.step(rows[:2], "replay of two rows", 2)


def _each(kit: Kit, check: Callable[[Kit, Setup], None]) -> str:
    chosen = some_setups(kit, most=1, head_sizes=HEAD_SIZES, captured=True)
    for setup in chosen:
        check(kit, setup)
    return "; ".join(str(setup) for setup in chosen)
