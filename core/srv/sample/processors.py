"""Logits processors: the changes that a request applies to its logits before a token is sampled.

    prepare(rows)  on the host: select the rows that are affected in this step; None: no row
    apply(logits)  on the device: change those rows in place
    observe(...)   on the device: count the sampled tokens, which the host may not know yet

State is on the device and is updated in stream order, so a token that was sampled in one step counts in the next step
before the host has read it. Nothing here synchronizes with the device. A grammar mask is another such class, which is
passed to `SamplerState`. Must not know how a token is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from srv.platform.transfers import Transfers
from srv.sample.verify import DraftRows
from srv.sched.plan import Start
from srv.types import SamplingParams


class SampleRow(NamedTuple):
    """One row of logits: its slot, and the absolute position of the token to sample.

    draft: number of drafts before it in its row of the plan. drafts_in_flight: drafts of earlier rows that may yet be
    rejected, so that the position is up to so much earlier; `DraftRows.positions` are exact.
    """

    slot: int
    position: int
    draft: int = 0
    drafts_in_flight: int = 0


class LogitsProcessor(Protocol):
    """One kind of change to logits. `start` and `end` mark the start and the end of a request in a slot.

    `params` are those of `start.request`, which generates tokens. In a step with drafts, `apply_drafts` and
    `observe_kept` are called in place of `apply` and `observe`; the rows given to `prepare` are then all positions of
    `drafts`.
    """

    def start(self, start: Start, params: SamplingParams) -> None: ...
    def end(self, slot: int) -> None: ...

    def prepare(self, rows: Sequence[SampleRow]) -> Any | None:
        """What `apply` needs for these rows, or None if it has nothing to do."""

    def apply(self, logits: torch.Tensor, prepared: Any) -> None:
        """Change logits, float32 [rows, vocab] on the device, in place."""

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens[i], int64 on the device, was sampled for slots[i]."""

    def apply_drafts(self, logits: torch.Tensor, prepared: Any, drafts: DraftRows) -> None:
        """Change logits, float32 [positions, vocab] on the device, in place: each as if the drafts before it had been
        sampled.
        """

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """tokens[i] was sampled for slots[i]; it is output if kept[i], bool on the device."""


class Latest:
    """A cache of one value, for the latest key, because the rows of consecutive steps are usually the same."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: Any = None

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        if self._value is None or self._key != key:
            self._key, self._value = key, make()
        return self._value

    def forget(self) -> None:
        self._key = self._value = None


class _PenalisedRows(NamedTuple):
    rows: torch.Tensor | None  # None: all of them, in order
    storage: torch.Tensor
    repetition: torch.Tensor  # these three: float32 [rows, 1]
    frequency: torch.Tensor
    presence: torch.Tensor
    # For each draft before one of the rows: which of these rows, and the index of the draft, both int64.
    draft_rows: torch.Tensor
    drafts: torch.Tensor


class Penalties:
    """Repetition penalty (Keskar et al. 2019, "CTRL"; tokens of prompt or output), and OpenAI's frequency and
    presence penalties (output only).

    Slots with a penalty get a storage row: the count of each token in the output, int32 [vocab], and whether it is in
    the prompt, bool [vocab]. The storage grows with the number of such slots.
    """

    def __init__(self, vocab_size: int, transfers: Transfers) -> None:
        self._vocab_size, self._transfers = vocab_size, transfers
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=transfers.device)
        self._prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=transfers.device)
        self._factors: npt.NDArray[np.float32] = np.zeros((0, 3), dtype=np.float32)
        self._storage: dict[int, int] = {}  # slot -> storage row
        self._free: list[int] = []
        self._prepared, self._observed = Latest(), Latest()

    def start(self, start: Start, params: SamplingParams) -> None:
        if not params.has_penalties:
            return
        if not self._free:
            self._grow()
        row = self._storage[start.slot] = self._free.pop()
        prompt = np.asarray(start.request.tokens, dtype=np.int64)
        output = np.asarray(start.output, dtype=np.int64)
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        self._transfers.update(self._counts[row], torch.from_numpy(counts))
        in_prompt = np.bincount(prompt, minlength=self._vocab_size) > 0
        self._transfers.update(self._prompt[row], torch.from_numpy(in_prompt))
        self._factors[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._forget()

    def end(self, slot: int) -> None:
        row = self._storage.pop(slot, None)
        if row is not None:
            self._free.append(row)
            self._forget()

    def _forget(self) -> None:
        self._prepared.forget()
        self._observed.forget()

    def _grow(self) -> None:
        old, new = len(self._counts), max(4, 2 * len(self._counts))
        counts = torch.zeros((new, self._vocab_size), dtype=torch.int32, device=self._transfers.device)
        prompt = torch.zeros((new, self._vocab_size), dtype=torch.bool, device=self._transfers.device)
        counts[:old].copy_(self._counts)
        prompt[:old].copy_(self._prompt)
        self._counts, self._prompt = counts, prompt
        self._factors = np.concatenate((self._factors, np.zeros((new - old, 3), dtype=np.float32)))
        self._free.extend(range(old, new))

    def prepare(self, rows: Sequence[SampleRow]) -> _PenalisedRows | None:
        if not self._storage:
            return None
        concerned = tuple((index, row.slot, row.draft) for index, row in enumerate(rows) if row.slot in self._storage)
        if not concerned:
            return None
        bundle: _PenalisedRows = self._prepared.get((len(rows), concerned), lambda: self._bundle(len(rows), concerned))
        return bundle

    def _bundle(self, count: int, concerned: tuple[tuple[int, int, int], ...]) -> _PenalisedRows:
        indices = self._transfers.upload_integers([index for index, _, _ in concerned])
        storage = [self._storage[slot] for _, slot, _ in concerned]
        before = [(row, index - back) for row, (index, _, draft) in enumerate(concerned) for back in range(draft)]
        factors = self._transfers.upload(self._factors[storage])
        return _PenalisedRows(
            None if len(concerned) == count else indices,
            self._transfers.upload_integers(storage),
            factors[:, 0:1],
            factors[:, 1:2],
            factors[:, 2:3],
            self._transfers.upload_integers([row for row, _ in before]),
            self._transfers.upload_integers([draft for _, draft in before]),
        )

    def apply(self, logits: torch.Tensor, prepared: _PenalisedRows) -> None:
        self._penalise(logits, prepared, self._counts.index_select(0, prepared.storage))

    def apply_drafts(self, logits: torch.Tensor, prepared: _PenalisedRows, drafts: DraftRows) -> None:
        """Each position counts the drafts before it as output."""
        counts = self._counts.index_select(0, prepared.storage)
        tokens = drafts.fed.index_select(0, prepared.drafts)
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._transfers.device)
        self._penalise(logits, prepared, counts.index_put_((prepared.draft_rows, tokens), ones, accumulate=True))

    def _penalise(self, logits: torch.Tensor, prepared: _PenalisedRows, counts: torch.Tensor) -> None:
        """counts: int32 [penalised rows, vocab], of each token in the output so far."""
        chosen = logits if prepared.rows is None else logits.index_select(0, prepared.rows)
        output = counts > 0
        occurs = self._prompt.index_select(0, prepared.storage) | output
        pushed = torch.where(chosen > 0, chosen / prepared.repetition, chosen * prepared.repetition)
        changed = torch.where(occurs, pushed, chosen) - prepared.frequency * counts - prepared.presence * output
        if prepared.rows is None:
            logits.copy_(changed)
        else:
            logits.index_copy_(0, prepared.rows, changed)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        if not self._storage:
            return
        concerned = tuple((index, slot) for index, slot in enumerate(slots) if slot in self._storage)
        if not concerned:
            return
        indices, storage, ones = self._observed.get(concerned, lambda: self._observers(concerned))
        self._counts.index_put_((storage, tokens.index_select(0, indices)), ones, accumulate=True)

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        concerned = tuple((index, slot) for index, slot in enumerate(slots) if slot in self._storage)
        if not concerned:
            return
        indices, storage, _ = self._observed.get(concerned, lambda: self._observers(concerned))
        output = tokens.index_select(0, indices), kept.index_select(0, indices).int()
        self._counts.index_put_((storage, output[0]), output[1], accumulate=True)

    def _observers(self, concerned: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, ...]:
        indices = torch.tensor([index for index, _ in concerned], dtype=torch.int64)
        storage = torch.tensor([self._storage[slot] for _, slot in concerned], dtype=torch.int64)
        ones = torch.ones(len(concerned), dtype=torch.int32)
        return tuple(self._transfers.upload(tensor) for tensor in (indices, storage, ones))


class _Entries(NamedTuple):
    """Single entries of the logits: row and token indices, int64, and a value for each, float32."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor
    before: torch.Tensor  # int64: an entry holds at positions below this one


def _entries(cells: Sequence[tuple[int, int, float, int]], transfers: Transfers) -> _Entries:
    rows, tokens, values, before = zip(*cells, strict=True)
    return _Entries(
        transfers.upload_integers(rows),
        transfers.upload_integers(tokens),
        transfers.upload(torch.tensor(values, dtype=torch.float32)),
        transfers.upload_integers(before),
    )


class LogitBias:
    """Adds the request's biases to single tokens; two biases for one token are added up."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._bias: dict[int, tuple[tuple[int, float], ...]] = {}
        self._prepared = Latest()

    def start(self, start: Start, params: SamplingParams) -> None:
        if params.logit_bias:
            self._bias[start.slot] = params.logit_bias
            self._prepared.forget()

    def end(self, slot: int) -> None:
        self._bias.pop(slot, None)

    def prepare(self, rows: Sequence[SampleRow]) -> _Entries | None:
        if not self._bias:
            return None
        concerned = tuple((index, row.slot) for index, row in enumerate(rows) if row.slot in self._bias)
        if not concerned:
            return None
        bundle: _Entries = self._prepared.get(concerned, lambda: self._bundle(concerned))
        return bundle

    def _bundle(self, concerned: tuple[tuple[int, int], ...]) -> _Entries:
        cells = [(index, token, bias, 0) for index, slot in concerned for token, bias in self._bias[slot]]
        return _entries(cells, self._transfers)

    def apply(self, logits: torch.Tensor, prepared: _Entries) -> None:
        logits.index_put_((prepared.rows, prepared.tokens), prepared.values, accumulate=True)

    def apply_drafts(self, logits: torch.Tensor, prepared: _Entries, drafts: DraftRows) -> None:
        self.apply(logits, prepared)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """A bias does not depend on sampled tokens."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""


class MinTokens:
    """Masks end tokens and stop token ids until `min_tokens` tokens have been generated.

    The number of generated tokens follows from the row's position, which the host knows unless drafts are in flight.
    """

    def __init__(self, vocab_size: int, end_tokens: frozenset[int], transfers: Transfers) -> None:
        self._vocab_size, self._end_tokens, self._transfers = vocab_size, end_tokens, transfers
        self._masked: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> first free position, token ids
        self._prepared = Latest()

    def start(self, start: Start, params: SamplingParams) -> None:
        if params.min_tokens > 0:
            ids = self._end_tokens.union(params.stop_token_ids)
            within = tuple(sorted(token for token in ids if 0 <= token < self._vocab_size))
            self._masked[start.slot] = len(start.request.tokens) + params.min_tokens, within
            self._prepared.forget()

    def end(self, slot: int) -> None:
        self._masked.pop(slot, None)

    def prepare(self, rows: Sequence[SampleRow]) -> _Entries | None:
        if not self._masked:
            return None
        concerned = tuple((index, row.slot) for index, row in enumerate(rows) if self._holds(row))
        if not concerned:
            return None
        bundle: _Entries = self._prepared.get(concerned, lambda: self._bundle(concerned))
        return bundle

    def _holds(self, row: SampleRow) -> bool:
        free, tokens = self._masked.get(row.slot, (0, ()))
        return row.position - row.drafts_in_flight < free and bool(tokens)

    def _bundle(self, concerned: tuple[tuple[int, int], ...]) -> _Entries:
        masked = [(index, *self._masked[slot]) for index, slot in concerned]
        cells = [(index, token, float("-inf"), free) for index, free, tokens in masked for token in tokens]
        return _entries(cells, self._transfers)

    def apply(self, logits: torch.Tensor, prepared: _Entries) -> None:
        logits.index_put_((prepared.rows, prepared.tokens), prepared.values)

    def apply_drafts(self, logits: torch.Tensor, prepared: _Entries, drafts: DraftRows) -> None:
        masked = drafts.positions.index_select(0, prepared.rows) < prepared.before
        values = torch.where(masked, prepared.values, 0.0)
        logits.index_put_((prepared.rows, prepared.tokens), values, accumulate=True)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """The mask does not depend on sampled tokens."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""
