"""L2: captured steps of decode attention, replayed with other lengths, other rows and padding.

A captured step reads static buffers, as in the runner: a step copies its inputs into them, plans, and replays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from srv.dtypes import FLOAT8
from srv.platform.interface import AttentionBatch, GraphKey, Graphs
from srv.testing.conformance.attention import (
    BIASED,
    CAPPED,
    LONG_WINDOW,
    MANY_SHARED_HEADS,
    SCALES,
    SHARED_HEADS,
    SOFT_CAP,
    WINDOWED,
    run_each,
    run_shared_heads,
    slopes,
)
from srv.testing.conformance.attention_reach import CHUNKS, SHARPENED, SINKS, with_sinks
from srv.testing.conformance.bench import PAGES, SPARE_PAGES, Bench, BenchRow, known_on_device, on_device, step_groups
from srv.testing.conformance.fp8_kv import with_scales
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.setups import (
    MAX_HEAD_SIZES,
    AttentionSetup,
    backend_specs,
    dtype_of,
    is_native,
    largest,
    select_setups,
)

COUNTS = (4, 2)  # row counts of the captured steps, the largest first, as in the engine
COLUMNS = 17  # of the page table, for pages of at least `MIN_SPAN` tokens
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
    """A replay uses the lengths of its own step: they grow, fill the page table, and belong to other rows."""
    summary = _run_each(kit, _check_other_lengths, max_page_sizes=largest(kit).captured_page_sizes)
    _run_each(kit, _check_full_tables, max_head_sizes=1)
    return f"{summary}; page tables are filled, by {largest(kit).tokens} tokens or more"


def padding(kit: Kit) -> str:
    """Padded rows, which have page 0 and length 1, do not change the others."""
    return _run_each(kit, _check_padding)


def back_to_back(kit: Kit) -> str:
    """A replay may be launched while the previous one of the same captured step still runs."""
    return _run_each(kit, _check_back_to_back)


def row_counts(kit: Kit) -> str:
    """Captured steps with different row counts, replayed alternately, and one with many rows."""
    summary = _run_each(kit, _check_row_counts)
    _run_each(kit, _check_many_rows, max_head_sizes=1)
    return f"{summary}; {largest(kit).rows} rows"


def gqa(kit: Kit) -> str:
    """KV heads that several query heads share, in numbers that are powers of two and not, or all of them."""

    def choose(heads: int, kv_heads: int) -> tuple[AttentionSetup, ...]:
        return _decoding(select_setups(kit, heads, kv_heads, max_page_sizes=1, captured=True))

    heads_of = SHARED_HEADS if is_native(kit) else SHARED_HEADS[1::4]  # 3, 7 and 16 share one
    summary = run_shared_heads(heads_of, choose, lambda setup: _check_shared_heads(kit, setup, "with shared KV heads"))
    summary_of_many = run_shared_heads(
        MANY_SHARED_HEADS, choose, lambda setup: _check_many_rows(kit, setup, largest(kit).tokens // 2)
    )
    return f"{summary}; {largest(kit).rows} rows, one of them long: {summary_of_many}"


def groups(kit: Kit) -> str:
    """Two cache groups in one captured step, one of them with a sliding window, whose layers follow one another."""
    chosen = _decoding(select_setups(kit, max_page_sizes=1, fields=WINDOWED, captured=True))
    for tokens in (5, LONG_WINDOW):
        summary = run_each(chosen, functools.partial(_check_groups, kit, window=tokens))
    return f"{summary}, windows of 5 and {LONG_WINDOW} tokens"


def kv_dtypes(kit: Kit) -> str:
    """Pools of int8 and of 8-bit floats, these with scales per layer."""
    names = [name for capability, dtypes in _KV_DTYPES.items() if capability in kit.capabilities for name in dtypes]
    if not names:
        raise NotApplicable("the plugin declares neither int8_kv nor fp8_kv")
    summaries: list[str] = []
    refusals: list[str] = []
    for name in names:
        try:
            chosen = _decoding(select_setups(kit, 4, 2, max_page_sizes=1, captured=True, kv_dtype=name))
        except NotApplicable as reason:
            refusals.append(f"{name}: {reason}")
            continue
        summaries.append(f"{name}: {run_each(chosen, lambda setup: _check_kv_dtype(kit, setup))}")
    if not summaries:
        raise NotApplicable("; ".join(refusals))
    return "; ".join((*summaries, *refusals))


def traits(kit: Kit) -> str:
    """Other scales, and the declared ones of sinks, capped scores, position biases, chunks and temperature."""
    declared = {trait for spec in backend_specs(kit, "attention") for trait in spec.traits}
    summaries: list[str] = []
    refusals: list[str] = []
    for trait, (fields, layer) in _TRAITS.items():
        if trait not in declared and trait != _SCALE:
            continue
        try:
            chosen = _decoding(select_setups(kit, 4, 2, max_page_sizes=1, fields=fields, captured=True))
        except NotApplicable as reason:
            refusals.append(f"{trait}: {reason}")
            continue
        summaries.append(f"{trait}: {run_each(chosen, functools.partial(_check_trait, kit, trait, layer))}")
    if not summaries:
        raise NotApplicable("; ".join(refusals))
    return "; ".join((*summaries, *refusals))


_SCALE = "scale"
# By trait: the fields of a model, and those of a layer.
_TRAITS: Mapping[str, tuple[Mapping[str, Any], Callable[[AttentionSetup], dict[str, Any]]]] = MappingProxyType(
    {
        _SCALE: ({}, lambda setup: {"scale": SCALES[0] * setup.shape.head_dim**-0.5}),
        "sinks": (SINKS, with_sinks),
        "soft_cap": (CAPPED, lambda setup: {"soft_cap": SOFT_CAP}),
        "alibi": (BIASED, lambda setup: {"alibi": slopes(setup)}),
        "chunks": (CHUNKS, lambda setup: {"chunk": 5}),
        "temperature": (SHARPENED, lambda setup: {"temperature_from": 4}),
    }
)
_KV_DTYPES = {"int8_kv": ("int8",), "fp8_kv": FLOAT8}  # by capability
Sequences = Sequence[tuple[BenchRow, ...]]  # rows of a step: of each sequence, one per cache group


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a cache group: one token of each row, as a batch, with its inputs on the host and on the device."""

    rows: Sequence[tuple[BenchRow, int]]
    batch: AttentionBatch
    inputs: tuple[Tensor, Tensor, Tensor]
    moved: Sequence[Tensor]


class _Group:
    """The static buffers of one cache group, which its layers in a captured step read."""

    def __init__(self, kit: Kit, bench: Bench, rows: int, columns: int) -> None:
        self.kit, self.bench = kit, bench
        shape, dtype = bench.setup.shape, dtype_of(bench.setup.dtype)
        zeros = [
            torch.zeros(rows, heads, shape.head_dim, dtype=dtype) for heads in (shape.heads, *[shape.kv_heads] * 2)
        ]
        self._q, self._k, self._v = on_device(zeros, kit.device, fused=True)
        self._table = torch.zeros(rows, columns, dtype=torch.int32, device=kit.device)

    def plan(self, count: int, lens: Sequence[int], ahead: int = 0) -> Any:
        batch = AttentionBatch([1] * count, list(lens), self._table[:count], graph=count)
        return self.bench.own.plan(known_on_device(batch, ahead))

    def forward(self, index: int, count: int, metadata: Any) -> Tensor:
        q, k, v = (part[:count] for part in (self._q, self._k, self._v))
        return self.bench.own.forward(self.bench.layers[index], q, k, v, metadata)

    def prepare(self, rows: Sequence[BenchRow]) -> _Step:
        """Allocate pages for one more token of each row, and copy its inputs to the device."""
        pairs, inputs = [(row, 1) for row in rows], self.bench.inputs(len(rows))
        step = _Step(pairs, self.bench.batch(pairs), inputs, [part.to(self.kit.device) for part in inputs])
        for row in rows:
            row.length += 1
        return step

    def load(self, step: _Step, count: int, ahead: int) -> Any:
        """Copy a step into the static buffers, and plan it for `count` rows, of which the last are padding."""
        used, lens = len(step.rows), step.batch.kv_lens
        self._table.zero_()
        self._table[:used, : step.batch.page_table.shape[1]].copy_(step.batch.page_table)
        for static, part in zip((self._q, self._k, self._v), step.moved, strict=True):
            static.zero_()
            static[:used].copy_(part)
        return self.plan(count, [*lens, *([1] * (count - used))], ahead)

    def compare(self, step: _Step, results: Tensor, what: str) -> None:
        """results: [layers, rows, heads, head_dim], on the host."""
        q, k, v = step.inputs
        for index, out in zip(LAYERS, results, strict=True):
            self.bench.expect(step.rows, index, k, v)
            self.bench.compare(step.rows, index, q, out[: len(step.rows)], what)


class _Captured:
    """Decode steps of one backend, captured for each of `counts`, the largest first.

    windows: of each cache group, which has a pool and a page table of its own; all have the same lengths. tokens: for
    which a page table has columns; if 0, those of `COLUMNS`. traits: see `Bench`.
    """

    def __init__(
        self,
        kit: Kit,
        setup: AttentionSetup,
        windows: Sequence[int | None] = (None,),
        counts: Sequence[int] = COUNTS,
        tokens: int = 0,
        **traits: Any,
    ) -> None:
        graphs = kit.platform.graphs
        if graphs is None:
            raise NotApplicable("Platform.graphs is None")
        self.kit, self.graphs = kit, graphs
        size = setup.layout.page_size
        self.columns = max(COLUMNS * setup.span // size, -(-tokens // size))
        pages = max(self.columns + SPARE_PAGES + 3 * counts[0], PAGES)
        benches = [
            Bench(kit, setup, seed=seed, window=window, pages=pages, **traits) for seed, window in enumerate(windows)
        ]
        self._groups = [_Group(kit, bench, counts[0], self.columns) for bench in benches]
        shape = (len(benches), len(LAYERS), counts[0], setup.shape.heads, setup.shape.head_dim)
        self._out = torch.zeros(shape, dtype=dtype_of(setup.dtype), device=kit.device)
        self.counts = counts
        self._results = {count: self._capture(graphs, count) for count in counts}

    def _capture(self, graphs: Graphs, count: int) -> Tensor:
        planned = [group.plan(count, [1] * count) for group in self._groups]
        out = self._out[:, :, :count]

        def run() -> Tensor:
            for index in LAYERS:
                for group, metadata, results in zip(self._groups, planned, out, strict=True):
                    results[index].copy_(group.forward(index, count, metadata))
            return out

        output: object = graphs.capture(GraphKey("decode", count), run)
        if not isinstance(output, Tensor) or output.shape != out.shape:
            raise Fault(f"capture returned {output!r}, not the output of the captured function")
        return output

    def sequence(self) -> tuple[BenchRow, ...]:
        """A new sequence."""
        return tuple(group.bench.sequence() for group in self._groups)

    def step(self, rows: Sequences, what: str, count: int = 0, ahead: int = 0) -> None:
        """Compute one token per row by replaying the captured step of `count` rows, by default that of the most;
        further rows are padding.

        ahead: as that of `Bench.step`.
        """
        self.steps(rows, 1, what, count, ahead)

    def steps(self, rows: Sequences, number: int, what: str, count: int = 0, ahead: int = 0) -> None:
        """Launch `number` such steps without waiting between them, and then compare all results."""
        of_groups = list(zip(self._groups, zip(*rows, strict=True), strict=True))
        # Copies to the device come first, because a copy may wait for a running replay.
        prepared = [[group.prepare(group_step) for group, group_step in of_groups] for _ in range(number)]
        results = [self._replay(steps, count or self.counts[0], ahead) for steps in prepared]
        self.kit.synchronize()
        for steps, result in zip(prepared, results, strict=True):
            for group, step, part in zip(self._groups, steps, result.to("cpu"), strict=True):
                group.compare(step, part, what)

    def _replay(self, steps: Sequence[_Step], count: int, ahead: int) -> Tensor:
        planned = [group.load(step, count, ahead) for group, step in zip(self._groups, steps, strict=True)]
        self.graphs.replay(GraphKey("decode", count), planned)
        return self._results[count].clone()

    def prompts(self, lens: Sequence[int]) -> list[tuple[BenchRow, ...]]:
        """Sequences whose prompts were computed eagerly."""
        rows = [self.sequence() for _ in lens]
        of_groups = zip(self._groups, zip(*rows, strict=True), strict=True)
        steps = [(group.bench, list(zip(group_rows, lens, strict=True))) for group, group_rows in of_groups]
        step_groups(steps, "eager prompts", layers=LAYERS)
        return rows


def _check_captured_lengths(kit: Kit, setup: AttentionSetup) -> None:
    captured = _Captured(kit, setup)
    for _ in range(3):
        captured.step([captured.sequence() for _ in range(COUNTS[0])], "replay at the captured lengths")


def _check_other_lengths(kit: Kit, setup: AttentionSetup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([1, size - 1, size, 2 * size + 3])
    for _ in range(3):
        captured.step(rows, "replay with grown lengths")
    others = captured.prompts([3 * size + 1, 2, size + 1, 5])
    captured.step(others, "replay with the lengths of other rows")
    captured.step([rows[3], others[0], rows[0], others[1]], "replay with rows in another order")
    if setup.takes_lengths:
        captured.step(rows, "replay with lengths that only the device knows", ahead=3)


def _check_full_tables(kit: Kit, setup: AttentionSetup) -> None:
    """Rows that grow to the last token of the page table's last column, next to short ones."""
    captured, size = _Captured(kit, setup, tokens=largest(kit).tokens if is_native(kit) else 0), setup.span
    rows = captured.prompts([captured.columns * setup.layout.page_size - 3, 2, 4 * size, 1])
    for _ in range(3):
        captured.step(rows, f"replay with a page table of {captured.columns} full columns")


def _check_padding(kit: Kit, setup: AttentionSetup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([size + 2, 3, 2 * size])
    for used in (3, 1, 2, 3):
        captured.step(rows[:used], f"replay of {COUNTS[0]} rows with {used} requests")


def _check_back_to_back(kit: Kit, setup: AttentionSetup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([size - 1, 2, size, 1])
    captured.steps(rows, 3, "replay while the previous one runs")


def _check_row_counts(kit: Kit, setup: AttentionSetup) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([4, size + 1, 2, size])
    for count, _ in itertools.product(COUNTS, range(2)):
        captured.step(rows[:count], f"replay of {count} rows", count)
        captured.step(rows[:2], "replay of two rows", 2)


def _check_many_rows(kit: Kit, setup: AttentionSetup, longest: int = 0) -> None:
    """longest: the tokens of one of the rows, if it is longer than the others, and not more than a native device's."""
    count = largest(kit).rows
    captured = _Captured(kit, setup, counts=(count,), tokens=longest + 3 if is_native(kit) else 0)
    longest = min(longest, captured.columns * setup.layout.page_size - 3)
    rows = captured.prompts([max(1 + number % 7, longest * (number == count // 2)) for number in range(count)])
    for used in (count, count // 2 + 1) if longest else (count, count // 2 + 1, count):
        captured.step(rows[:used], f"replay of {count} rows with {used} requests")


def _check_shared_heads(kit: Kit, setup: AttentionSetup, what: str) -> None:
    captured, size = _Captured(kit, setup), setup.span
    rows = captured.prompts([1, size - 1, 2 * size + 3])
    for _ in range(2):
        captured.step(rows, f"replay {what}")


def _check_kv_dtype(kit: Kit, setup: AttentionSetup) -> None:
    _check_shared_heads(kit, with_scales(setup), f"over {setup.layout.dtype}")


def _check_trait(
    kit: Kit, trait: str, fields: Callable[[AttentionSetup], dict[str, Any]], setup: AttentionSetup
) -> None:
    windows = (None, 5) if "window" in setup.spec.traits and trait in ("sinks", "soft_cap") else (None,)
    captured, size = _Captured(kit, setup, windows, **fields(setup)), setup.span
    rows = captured.prompts([1, size - 1, 3 * size + 3])
    for order in ((0, 1, 2), (0, 1, 2), (2, 0)):
        captured.step([rows[number] for number in order], f"replay of layers with {trait}")


def _check_groups(kit: Kit, setup: AttentionSetup, window: int) -> None:
    size = setup.span
    captured = _Captured(kit, setup, windows=(window, None), tokens=window + 2 * size + 8)
    rows = captured.prompts([1, size - 1, max(2 * size, window) + 3])
    for order in ((0, 1, 2), (0, 1, 2), (2, 0)):
        what = f"replay of two cache groups, one with a window of {window} tokens"
        captured.step([rows[number] for number in order], what)


def _decoding(setups: Sequence[AttentionSetup]) -> tuple[AttentionSetup, ...]:
    return tuple(setup for setup in setups if setup.decodes)


def _run_each(
    kit: Kit,
    check: Callable[[Kit, AttentionSetup], None],
    max_page_sizes: int = 1,
    max_head_sizes: int = MAX_HEAD_SIZES,
) -> str:
    chosen = _decoding(select_setups(kit, max_page_sizes=max_page_sizes, max_head_sizes=max_head_sizes, captured=True))
    return run_each(chosen, lambda setup: check(kit, setup))
