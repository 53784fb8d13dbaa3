"""Which steps replay a captured graph, and the contents of the static buffers. Without a device, replays call `run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.platform.interface import AttentionBackend, AttentionBatch, AttentionLayer, GraphKey
from srv.sample.pooling import VectorRow
from srv.sample.verify import DraftRows, DraftShape
from srv.worker.batch import Inputs
from srv.worker.graphs import CapturedSteps, StaticBuffers
from srv.worker.slots import PageTables
from srv.worker.ways import ForwardStep

VOCAB = 3


class Model(CausalLM):
    """Its logits are the token, the position and the first page of each row."""

    attention_layers = (AttentionLayer(0, 1, 1, 1, 1.0),)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        pages = cast(Any, context.attend)(self.attention_layers[0], None, None, None)
        return torch.stack([inputs.tokens, inputs.positions, pages[:, 0]], dim=-1).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Attention:
    """Records the batches that it planned; `forward` returns their page table."""

    def __init__(self) -> None:
        self.planned: list[AttentionBatch] = []

    def supports(self, layer: AttentionLayer) -> str | None:
        return None

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        self.planned.append(batch)
        return batch

    def forward(self, layer: Any, q: Any, k: Any, v: Any, metadata: AttentionBatch) -> torch.Tensor:
        return metadata.page_table


class Again:
    """`Graphs` that call the captured function again."""

    def __init__(self) -> None:
        self.captured: dict[GraphKey, Callable[[], torch.Tensor]] = {}
        self.replayed: list[tuple[GraphKey, Any]] = []

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.captured[key] = run
        return run()

    def replay(self, key: GraphKey, metadata: Any) -> None:
        self.replayed.append((key, metadata))
        self.captured[key]()


def steps(
    rows: tuple[int, ...] = (2, 4), padding: bool = True
) -> tuple[CapturedSteps, Attention, Again, StaticBuffers]:
    attention, graphs = Attention(), Again()
    buffers = StaticBuffers(rows[-1], [5], VOCAB, HOST_TRANSFERS)
    backend = cast(AttentionBackend, attention)
    made = CapturedSteps(Model(), [backend], graphs, buffers, rows, padding=padding)
    made.capture()
    attention.planned.clear()
    return made, attention, graphs, buffers


def inputs(rows: int, tokens: int | None = None, scores: bool = False, vectors: bool = False) -> Inputs:
    """Row i has token 10 + i at position 20 + i."""
    count = rows if tokens is None else tokens
    return Inputs(
        model=ModelInputs(torch.arange(10, 10 + count), torch.arange(20, 20 + count)),
        query_lens=[1] * rows,
        kv_lens=list(range(21, 21 + rows)),
        outputs=None,
        sampled=list(range(rows)),
        scores=[(0, np.zeros(1, dtype=np.int64))] if scores else [],
        vectors={0: VectorRow(0, 0, 1, 21)} if vectors else {},
    )


def table(*rows: list[int]) -> PageTables:
    """The page tables of one cache group."""
    return (torch.tensor(rows, dtype=torch.int32),)


def replay(made: CapturedSteps, given: Inputs, tables: PageTables) -> torch.Tensor:
    hidden, logits, way = made.run(ForwardStep((), given, tables))
    assert (hidden, way) == (None, "graph")
    assert logits is not None
    return logits


def test_the_largest_is_captured_first() -> None:
    assert [key.rows for key in steps((1, 2, 8))[2].captured] == [8, 2, 1]


@pytest.mark.parametrize(
    ("given", "padded", "exact"),
    [
        (inputs(1), 2, None),
        (inputs(2), 2, 2),
        (inputs(3), 4, None),
        (inputs(4), 4, 4),
        (inputs(5), None, None),
        (inputs(2, tokens=3), None, None),
        (inputs(2, scores=True), None, None),
        (inputs(2, vectors=True), None, None),
    ],
    ids=["1", "2", "3", "4", "more than captured", "a prompt among them", "scored", "hidden states returned"],
)
def test_which_graph_replays_a_step(given: Inputs, padded: int | None, exact: int | None) -> None:
    for count, padding in ((padded, True), (exact, False)):
        made, _, graphs, _ = steps(padding=padding)
        assert made.covers(given) == (count is not None)
        if count is not None:
            replay(made, given, table(*[[5]] * len(given.query_lens)))
            assert [key.rows for key, _ in graphs.replayed] == [count]


def test_padded_rows_are_token_0_at_position_0_of_page_0_with_one_token() -> None:
    made, attention, graphs, buffers = steps()
    replay(made, inputs(4), table([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]))
    logits = replay(made, inputs(3), table([1], [2], [3]))
    assert logits.tolist() == [[10.0, 20.0, 1.0], [11.0, 21.0, 2.0], [12.0, 22.0, 3.0]]
    assert (buffers.tokens[3].item(), buffers.positions[3].item()) == (0, 0)
    assert buffers.pages[0].tolist() == [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [3, 0, 0, 0, 0], [0] * 5]
    batch = attention.planned[-1]
    assert (batch.query_lens, batch.kv_lens, batch.graph) == ([1] * 4, [21, 22, 23, 1], 4)
    assert graphs.replayed[-1] == (GraphKey("decode", 4), [batch])


def test_plans_of_equal_row_counts_use_the_same_addresses() -> None:
    made, attention, _, buffers = steps()
    for rows in (1, 2, 3, 1):
        replay(made, inputs(rows), table(*[[5]] * rows))
    assert {batch.page_table.data_ptr() for batch in attention.planned} == {buffers.pages[0].data_ptr()}
    assert [batch.page_table.shape for batch in attention.planned] == [(2, 5), (2, 5), (4, 5), (2, 5)]


def test_an_unchanged_page_table_is_not_copied_again() -> None:
    made, _, _, buffers = steps()
    pages = table([1, 2], [3, 4])
    replay(made, inputs(2), pages)
    buffers.pages[0].zero_()  # overwritten to detect whether they are filled again
    replay(made, inputs(2), pages)
    assert buffers.pages[0].count_nonzero() == 0
    replay(made, inputs(2), table([1, 2], [3, 4]))
    assert buffers.pages[0][:2, :2].tolist() == [[1, 2], [3, 4]]


def test_rows_behind_those_of_a_step_are_padded() -> None:
    made, _, _, buffers = steps((2, 4))
    four = table([1], [2], [3], [4])
    replay(made, inputs(4), four)
    replay(made, inputs(1), table([5]))
    assert buffers.pages[0][:, 0].tolist() == [5, 0, 3, 4]
    replay(made, inputs(3), table([6], [7], [8]))
    assert buffers.pages[0][:, 0].tolist() == [6, 7, 8, 0]
    assert buffers.tokens.tolist() == [10, 11, 12, 0]
    assert buffers.positions.tolist() == [20, 21, 22, 0]


def test_a_step_with_drafts_is_replayed_with_one_row_per_token() -> None:
    """Row 0 has two tokens, row 1 one; the true lengths of both are below the bounds."""
    made, attention, _, buffers = steps((2, 4))
    drafted = replace(
        inputs(2, tokens=3),
        query_lens=[2, 1],
        kv_lens=[25, 26],
        lengths=torch.tensor([22, 23], dtype=torch.int32),
        drafts=DraftRows(DraftShape([2, 1], HOST_TRANSFERS), torch.zeros(3), torch.zeros(2)),
        drafts_only=True,
    )
    assert made.covers(drafted)
    assert not made.covers(replace(drafted, drafts_only=False))  # a prompt chunk is among the rows
    logits = replay(made, drafted, table([1, 2], [3, 0]))
    assert logits.tolist() == [[10.0, 20.0, 1.0], [11.0, 21.0, 1.0], [12.0, 22.0, 3.0]]
    assert buffers.pages[0][:3].tolist() == [[1, 2, 0, 0, 0], [1, 2, 0, 0, 0], [3, 0, 0, 0, 0]]
    batch = attention.planned[-1]
    assert (batch.query_lens, batch.kv_lens) == ([1] * 4, [24, 25, 26, 1])
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [21, 22, 23, 1]
