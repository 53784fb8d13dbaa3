"""Tensors that are cached between steps of the same slots: reused while they are valid, rebuilt when they are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.sched.plan import Row, Start
from srv.types import RequestSpec, SamplingParams
from srv.worker import batch
from srv.worker.slots import Slots

DEVICE = torch.device("cpu")
PROMPT = (7, 8, 9)


def started(*names: int, pages: Sequence[int] = ()) -> Slots:
    """Slots that have computed their prompts; slot i has the pages 10 i + 1, ...; `pages`: the number of each."""
    slots = Slots(8, [6], HOST_TRANSFERS)
    for name in names:
        slots.start(Start(name, RequestSpec(id=str(name), tokens=PROMPT, params=SamplingParams(max_tokens=9))))
    for name, count in zip(names, pages, strict=False):
        slots.append_pages(Row(name, 0, 3, True, (tuple(range(10 * name + 1, 10 * name + 1 + count)),)))
    return slots


def decoding(name: int, computed: int, score: int = 0) -> Row:
    return Row(name, computed, 1, True, ((),), score)


class TestPageTable:
    def test_it_is_as_wide_as_the_longest_of_the_slots(self) -> None:
        slots = started(0, 2, 3, pages=(1, 3, 2))
        assert slots.page_tables((2, 0))[0].tolist() == [[21, 22, 23], [1, 0, 0]]
        assert slots.page_tables((0,))[0].tolist() == [[1]]

    def test_it_is_the_same_until_pages_or_slots_change(self) -> None:
        slots = started(0, 2, pages=(1, 2))
        table = slots.page_tables((0, 2))[0]
        assert slots.page_tables((0, 2))[0] is table
        assert slots.page_tables((2, 0))[0] is not table

    def test_a_returned_table_is_never_changed(self) -> None:
        """A device may still be copying it."""
        slots = started(0, pages=(1,))
        before = slots.page_tables((0,))[0]
        slots.append_pages(Row(0, 3, 1, True, ((5,),)))
        after = slots.page_tables((0,))[0]
        slots.end(0)
        assert (before.tolist(), after.tolist()) == ([[1]], [[1, 5]])
        assert slots.page_tables((0,))[0].tolist() == [[]]


@pytest.mark.parametrize("names", [(0,), (2, 3, 4), (3, 2), (1, 5, 6), (7, 0)], ids=str)
def test_last_tokens_follow_their_slots(names: tuple[int, ...]) -> None:
    slots = Slots(8, [6], HOST_TRANSFERS)
    everything = tuple(range(8))
    slots.store_last_tokens(everything, torch.arange(100, 108))
    slots.store_last_tokens(names, torch.arange(len(names)) + 50)
    assert slots.last_tokens(names).tolist() == [50 + index for index in range(len(names))]
    expected = [50 + names.index(name) if name in names else 100 + name for name in everything]
    assert slots.last_tokens(everything).tolist() == expected


class TestPositions:
    def test_they_advance_in_place(self) -> None:
        slots = Slots(8, [6], HOST_TRANSFERS)
        first = slots.positions([4, 9])
        assert first.tolist() == [4, 9]
        again = slots.positions([5, 10])
        assert again.tolist() == [5, 10]
        assert again.data_ptr() == first.data_ptr()

    @pytest.mark.parametrize("then", [[5, 9], [4, 9], [5], [5, 10, 3], [10, 5]], ids=str)
    def test_other_rows_are_rebuilt(self, then: list[int]) -> None:
        slots = Slots(8, [6], HOST_TRANSFERS)
        before = slots.positions([4, 9])
        found = slots.positions(then)
        assert found.tolist() == then
        assert found.data_ptr() != before.data_ptr()


class TestBuild:
    def test_a_decode_step_feeds_the_sampled_tokens(self) -> None:
        slots = started(1, 3)
        slots.store_last_tokens((1, 3), torch.tensor([41, 43]))
        inputs = batch.build([decoding(1, 3), decoding(3, 6)], slots, HOST_TRANSFERS)
        assert (inputs.model.tokens.tolist(), inputs.model.positions.tolist()) == ([41, 43], [3, 6])
        assert (inputs.query_lens, inputs.kv_lens, inputs.sampled) == ([1, 1], [4, 7], [0, 1])
        assert (inputs.outputs, inputs.scores) == (None, [])

    @pytest.mark.parametrize(
        ("row", "tokens"),
        [
            (decoding(3, 2), [41, 9]),
            (Row(3, 0, 3, True, ((),)), [41, 7, 8, 9]),
            (Row(3, 1, 1, False, ((),)), [41, 8]),
        ],
        ids=["its last token is known", "a prompt", "the middle of a prompt"],
    )
    def test_rows_with_known_tokens_are_fed_those(self, row: Row, tokens: list[int]) -> None:
        slots = started(1, 3)
        slots.store_last_tokens((1, 3), torch.tensor([41, 43]))
        inputs = batch.build([decoding(1, 3), row], slots, HOST_TRANSFERS)
        end = row.computed + row.scheduled
        assert inputs.model.tokens.tolist() == tokens
        assert inputs.model.positions.tolist() == [3, *range(row.computed, end)]
        assert inputs.kv_lens == [4, end]
        assert inputs.sampled == ([0, 1] if row.sample else [0])
