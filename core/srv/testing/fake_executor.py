"""An executor without a model, for tests of the scheduler and the engine loop.

Owns a simulated KV pool, in which the cell of a position contains a checksum of all tokens up to that position. The
next token is derived from that cell, so a page that was wrongly shared, freed or overwritten changes the generated
tokens. With `snapshots`, each slot also has a state, that cell, as recurrent layers have. Of the drafts of a row, a
number that looks random is right; the others leave cells that no token has. A plan that violates a rule raises
AssertionError immediately. Steps run when they are submitted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from srv.memory.groups import PageGroup
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result, Row, RowResult, Start
from srv.types import Pooling, PoolingParams, SamplingParams, TokenLogprob

_REJECTED = -1  # the KV cell of a rejected draft


def checksum(token: int, before: int) -> int:
    """The KV cell of a position: the checksum of its token and the previous cell (0 at the first position)."""
    return zlib.crc32(token.to_bytes(8, "little"), before)


def kv_cells_of(tokens: Sequence[int]) -> list[int]:
    """The KV cells of a sequence."""
    cells: list[int] = []
    for token in tokens:
        cells.append(checksum(token, cells[-1] if cells else 0))
    return cells


@dataclass(slots=True)
class _Slot:
    start: Start
    tokens: list[int]
    cells: list[int]  # the expected KV cell of each token
    tables: tuple[list[int], ...]
    computed: int = 0
    damaged: bool = field(default=False)
    pooled: list[int] = field(default_factory=list)  # the cells that were pooled so far


class FakeExecutor:
    """`groups`: the pages of each cache group; sampled tokens are below `vocab_size`.

    `snapshots`: the slots for copies of states; None: there are no states.
    `row_error(step, slot)` and `step_error(step)` return True to inject a failure. A failed step applies only its
    `ends`.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        vocab_size: int = 50,
        row_error: Callable[[int, int], bool] = lambda step, slot: False,
        step_error: Callable[[int], bool] = lambda step: False,
        snapshots: int | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._states: dict[int, int] = {}  # of running requests by their slot, and of snapshots by -slot
        self.groups = tuple(groups)
        self.vocab_size = vocab_size
        self.row_error = row_error
        self.step_error = step_error
        self._kv = [[[0] * group.page_size for _ in range(group.pages + 1)] for group in groups]
        self._slots: dict[int, _Slot] = {}
        self._next_step = 0
        self._waiting: tuple[Plan, Future[Result]] | None = None  # a step with late rows, until `sample`
        self._masks: dict[int, bytes] = {}

    def submit(self, plan: Plan) -> Future[Result]:
        future: Future[Result] = Future()
        assert self._waiting is None, "a step was submitted before the one that waits for late inputs has sampled"
        assert plan.step == self._next_step, f"step {plan.step} was submitted instead of step {self._next_step}"
        self._next_step += 1
        for slot in plan.ends:
            self._slots.pop(slot, None)
        if self.step_error(plan.step):
            for row in plan.rows:
                if row.slot in self._slots:
                    self._slots[row.slot].damaged = True
            future.set_exception(RuntimeError("the step failed"))
            return future
        for start in plan.starts:
            tables: tuple[list[int], ...] = tuple([] for _ in self._kv)
            self._slots[start.slot] = _Slot(start, list(start.tokens), kv_cells_of(start.tokens), tables)
            self._states[start.slot] = self._states[-start.restored] if start.restored else 0
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        if plan.late:
            self._waiting = plan, future
            return future
        future.set_result(Result(plan.step, tuple(self._run(plan.step, row) for row in plan.rows)))
        return future

    def sample(self, step: int, late: LateInputs) -> None:
        """The rows of the waiting step sample; one with a mask takes the lowest token that the mask allows."""
        if self._waiting is None:  # the step failed when it was submitted
            return
        (plan, future), self._waiting = self._waiting, None
        assert plan.step == step
        self._masks = dict(late.masks)
        assert set(self._masks) <= set(plan.late)
        future.set_result(Result(step, tuple(self._run(step, row) for row in plan.rows)))
        self._masks = {}

    def _run(self, step: int, row: Row) -> RowResult:
        slot = self._slots.get(row.slot)
        if slot is None or slot.damaged:  # its Start, or an earlier row, was in a step that failed
            return RowResult(row.slot, error=("lost", "the slot's state was lost"))
        if self.row_error(step, row.slot):
            slot.damaged = True
            return RowResult(row.slot, error=("row_failed", "the row failed"))
        self._append_pages(slot, row)
        begin = self._begin(slot, row)
        end = begin + row.scheduled - row.drafts
        assert slot.computed in (0, begin), f"positions {slot.computed}..{begin} were skipped"
        assert row.scheduled > row.drafts, "a row without a known token"
        if row.forced:
            self._jump(slot, row)
        assert end <= len(slot.tokens), "a row contains a position whose token is not known"
        self._write(slot, begin, end)
        tokens = self._sample(slot, row, end) if row.sample else ()
        slot.computed = end + max(0, len(tokens) - 1)
        if self._snapshots is not None:
            self._update_state(slot, row, begin, end)
        params = slot.start.request.params
        with_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        logprobs = tuple(TokenLogprob(token, -1.0, 1) for token in tokens) if with_logprobs else None
        return RowResult(row.slot, tokens, logprobs, self._scores(slot, row), self._vectors(slot, row))

    def _jump(self, slot: _Slot, row: Row) -> None:
        """The row's forced tokens are known from now on."""
        assert len(row.forced) == row.scheduled > 1, f"{row} does not have one token for each position"
        assert row.computed == len(slot.tokens) - 1, f"{row} does not begin with the last of {len(slot.tokens)} tokens"
        assert row.forced[0] == slot.tokens[-1], f"{row.forced[0]} was forced, but {slot.tokens[-1]} was sampled"
        for token in row.jumped:
            slot.tokens.append(token)
            slot.cells.append(checksum(token, slot.cells[-1]))

    def _update_state(self, slot: _Slot, row: Row, begin: int, end: int) -> None:
        expected = slot.cells[begin - 1] if begin else 0
        assert self._states[row.slot] == expected, f"the state is not that of the {begin} tokens before the row"
        assert not row.drafts, "a row with drafts changes the state by tokens that may be rejected"
        self._states[row.slot] = slot.cells[end - 1]
        if row.saved:
            self._states[-row.saved] = slot.cells[end - 1]

    def _begin(self, slot: _Slot, row: Row) -> int:
        """Where the row begins: the plan knows only a bound while drafts of earlier rows are not applied."""
        if not row.drafts_in_flight:
            return row.computed
        begin = len(slot.tokens) - 1
        assert row.computed - row.drafts_in_flight <= begin <= row.computed, (
            f"{begin} is not within the bounds of {row}"
        )
        return begin

    def _append_pages(self, slot: _Slot, row: Row) -> None:
        for group, table, new, pool in zip(self.groups, slot.tables, row.new_pages, self._kv, strict=True):
            behind = group.first_needed_page(row.computed - row.drafts_in_flight)
            absent = max(0, behind - len(table))  # pages that the row does not need may be 0
            table.extend(new)
            assert all(0 < page < len(pool) for page in new[absent:]), f"pages {new} are not all in 1..{len(pool) - 1}"
            assert len(set(table[behind:])) == len(table[behind:]), "a page is in the table twice"
            end = row.computed + row.scheduled
            assert len(table) >= group.pages_for(end), f"{len(table)} pages do not cover {end} positions"
            table[:behind] = [0] * min(behind, len(table))  # they may belong to others now

    def _write(self, slot: _Slot, begin: int, end: int, rejected: bool = False) -> None:
        """Compute positions [begin, end): write their cells, and check the cells that attention would read.

        `rejected`: the positions are those of rejected drafts, so their cells are wrong.
        """
        for group, table in enumerate(slot.tables):
            page_group = self.groups[group]
            size, first = page_group.page_size, page_group.first_needed_page(begin)
            others = [
                other.tables[group][page_group.first_needed_page(other.computed) :]
                for other in self._slots.values()
                if other is not slot and not other.damaged
            ]
            for page in table[begin // size : -(-end // size)]:
                assert not any(page in other for other in others), f"page {page} is written while another slot has it"
            pool = self._kv[group]
            for position in range(begin, end):
                pool[table[position // size]][position % size] = _REJECTED if rejected else slot.cells[position]
            if rejected:
                continue
            cells = [cell for page in table[first : -(-end // size)] for cell in pool[page]][: end - first * size]
            attended = min(end - first * size, (page_group.window or end) - 1 + end - begin)
            assert cells[-attended:] == slot.cells[end - attended : end], "attention would read the KV of other tokens"

    def _sample(self, slot: _Slot, row: Row, end: int) -> tuple[int, ...]:
        """The accepted drafts and one more token. `end`: the position of the first draft."""
        assert end == len(slot.tokens), "sampling before the last known token"
        assert row.sample == 1 + row.drafts, f"{row.sample} tokens are sampled of a row with {row.drafts} drafts"
        sampled: list[int] = []
        accepted = slot.cells[-1] // 7 % (row.drafts + 1)
        drafts_end = end + row.drafts
        while True:
            token = self._read(slot, end - 1) % self.vocab_size
            mask = self._masks.get(row.slot)
            if mask is not None:
                assert not row.drafts, "a row with a mask has drafts"
                token = next(
                    candidate for candidate in range(self.vocab_size) if mask[candidate // 8] >> candidate % 8 & 1
                )
            sampled.append(token)
            slot.tokens.append(token)
            slot.cells.append(checksum(token, slot.cells[-1]))
            if len(sampled) > accepted:
                self._write(slot, end, drafts_end, rejected=True)
                return tuple(sampled)
            self._write(slot, end, end + 1)
            end += 1

    def _read(self, slot: _Slot, position: int) -> int:
        size = self.groups[0].page_size
        return self._kv[0][slot.tables[0][position // size]][position % size]

    def _scores(self, slot: _Slot, row: Row) -> tuple[TokenLogprob, ...] | None:
        """Prompt log-probabilities; each one is its position, negated."""
        if not row.score:
            return None
        end = row.computed + row.scheduled
        positions = range(end - row.score + 1, min(end, len(slot.start.request.tokens) - 1) + 1)
        return tuple(TokenLogprob(slot.tokens[position], -float(position), 1) for position in positions)

    def _vectors(self, slot: _Slot, row: Row) -> bytes | None:
        """One element per cell, as `expected_vectors` gives them; a pooled vector is that of the sum of its cells."""
        if not row.vectors:
            return None
        end, request = row.computed + row.scheduled, slot.start.request
        cells = [self._read(slot, position) for position in range(end - row.vectors, end)]
        if not isinstance(request.params, PoolingParams):
            return expected_vectors(cells)
        slot.pooled += cells
        if end < len(request.tokens):
            return None
        assert len(slot.pooled) == (1 if request.params.pooling is Pooling.LAST else len(request.tokens))
        return expected_vectors([sum(slot.pooled)])


def expected_vectors(cells: Sequence[int]) -> bytes:
    """The vectors that FakeExecutor returns for KV cells: one float32 per cell, the cell modulo 2**16."""
    return struct.pack(f"<{len(cells)}f", *(cell % (1 << 16) for cell in cells))


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 50) -> list[int]:
    """The tokens that FakeExecutor generates for a prompt, independent of scheduling and of other requests."""
    state = kv_cells_of(prompt)[-1]
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(state % vocab_size)
        state = checksum(tokens[-1], state)
    return tokens
