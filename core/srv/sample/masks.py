"""Logits processors that exclude tokens: all but some (`allowed_token_ids`), and the last tokens of word sequences
(`bad_words`).

Both are masks of minus infinity. That of a sequence depends on the output before it, which is on the device and is
updated in stream order, like the counts of penalties. Must not know how a token is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from srv.platform.transfers import Transfers
from srv.sample.processors import Latest, SampleRow
from srv.sample.verify import DraftRows
from srv.sched.plan import Start
from srv.types import SamplingParams

_NO_TOKEN = -1  # before the output


class _Allowed(NamedTuple):
    rows: torch.Tensor  # int64 [n]
    forbidden: torch.Tensor  # bool [n, vocab]


class AllowedTokens:
    """Masks all tokens that the request does not allow."""

    def __init__(self, vocab_size: int, transfers: Transfers) -> None:
        self._vocab_size, self._transfers = vocab_size, transfers
        self._forbidden: dict[int, torch.Tensor] = {}  # slot -> bool [vocab] on the device
        self._prepared = Latest()

    def start(self, start: Start, params: SamplingParams) -> None:
        if params.allowed_token_ids:
            forbidden = np.ones(self._vocab_size, dtype=bool)
            forbidden[list(params.allowed_token_ids)] = False
            self._forbidden[start.slot] = self._transfers.upload(forbidden)
            self._prepared.forget()

    def end(self, slot: int) -> None:
        if self._forbidden.pop(slot, None) is not None:
            self._prepared.forget()

    def prepare(self, rows: Sequence[SampleRow]) -> _Allowed | None:
        if not self._forbidden:
            return None
        concerned = tuple((index, row.slot) for index, row in enumerate(rows) if row.slot in self._forbidden)
        if not concerned:
            return None
        bundle: _Allowed = self._prepared.get(concerned, lambda: self._bundle(concerned))
        return bundle

    def _bundle(self, concerned: tuple[tuple[int, int], ...]) -> _Allowed:
        indices = self._transfers.upload_integers([index for index, _ in concerned])
        return _Allowed(indices, torch.stack([self._forbidden[slot] for _, slot in concerned]))

    def apply(self, logits: torch.Tensor, prepared: _Allowed) -> None:
        chosen = logits.index_select(0, prepared.rows)
        logits.index_copy_(0, prepared.rows, chosen.masked_fill_(prepared.forbidden, float("-inf")))

    def apply_drafts(self, logits: torch.Tensor, prepared: _Allowed, drafts: DraftRows) -> None:
        self.apply(logits, prepared)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """The mask does not depend on sampled tokens."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""


class _Sequences(NamedTuple):
    """All sequences of the rows concerned, one entry each; `width` tokens before the last one, padded in front."""

    rows: torch.Tensor  # int64 [n]
    before: torch.Tensor  # int64 [n, width]
    matters: torch.Tensor  # bool [n, width]; False for padding
    last: torch.Tensor  # int64 [n]
    storage: torch.Tensor  # int64 [n], the row of the recent output
    drafts: torch.Tensor  # int64 [n, width], the index of the draft at each place
    is_draft: torch.Tensor  # bool [n, width]; False where the place is in the recent output
    earlier: torch.Tensor  # int64 [n, width], the place in the recent output


class BadWords:
    """Masks the last token of each banned sequence where the output ends with the tokens before it.

    Slots with such sequences get a storage row with the last `width` tokens of their output, int64. `width` is one less
    than the longest sequence so far; rows and width grow when a request needs it.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._recent = torch.zeros((0, 0), dtype=torch.int64, device=transfers.device)
        self._banned: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._storage: dict[int, int] = {}  # slot -> storage row
        self._free: list[int] = []
        self._prepared, self._observed = Latest(), Latest()

    @property
    def _width(self) -> int:
        return self._recent.shape[1]

    def start(self, start: Start, params: SamplingParams) -> None:
        if not params.banned:
            return
        self._grow(max(map(len, params.banned)) - 1)
        row = self._storage[start.slot] = self._free.pop()
        self._banned[start.slot] = params.banned
        if self._width:
            output = ([_NO_TOKEN] * self._width + list(start.output))[-self._width :]
            self._transfers.update(self._recent[row], torch.tensor(output, dtype=torch.int64))
        self._forget()

    def end(self, slot: int) -> None:
        row = self._storage.pop(slot, None)
        if row is not None:
            del self._banned[slot]
            self._free.append(row)
            self._forget()

    def _forget(self) -> None:
        self._prepared.forget()
        self._observed.forget()

    def _grow(self, width: int) -> None:
        """Make room for one more row, and for `width` tokens in each."""
        rows, old = self._recent.shape
        if self._free and width <= old:
            return
        added_rows = 0 if self._free else max(4, rows)
        size = (rows + added_rows, max(width, old))
        recent = torch.full(size, _NO_TOKEN, dtype=torch.int64, device=self._transfers.device)
        recent[:rows, size[1] - old :].copy_(self._recent)
        self._recent = recent
        self._free.extend(range(rows, rows + added_rows))

    def prepare(self, rows: Sequence[SampleRow]) -> _Sequences | None:
        if not self._storage:
            return None
        concerned = tuple((index, row.slot, row.draft) for index, row in enumerate(rows) if row.slot in self._storage)
        if not concerned:
            return None
        bundle: _Sequences = self._prepared.get((self._width, concerned), lambda: self._bundle(concerned))
        return bundle

    def _bundle(self, concerned: tuple[tuple[int, int, int], ...]) -> _Sequences:
        width = self._width
        entries = [(*place, ids) for place in concerned for ids in self._banned[place[1]]]
        before = np.full((len(entries), width), _NO_TOKEN, dtype=np.int64)
        matters = np.zeros((len(entries), width), dtype=bool)
        drafts, earlier = np.zeros_like(before), np.zeros_like(before)
        is_draft = np.zeros_like(matters)
        for at, (index, _, draft, ids) in enumerate(entries):
            if len(ids) > 1:
                before[at, width - len(ids) + 1 :] = ids[:-1]
                matters[at, width - len(ids) + 1 :] = True
            # The tokens before a position are the recent output, then the drafts at (index - draft, index].
            places = np.arange(width) + draft
            is_draft[at] = places >= width
            drafts[at] = np.where(is_draft[at], index - draft + 1 + places - width, 0)
            earlier[at] = np.minimum(places, width - 1)
        upload = self._transfers.upload
        return _Sequences(
            self._transfers.upload_integers([index for index, _, _, _ in entries]),
            upload(before),
            upload(matters),
            self._transfers.upload_integers([ids[-1] for _, _, _, ids in entries]),
            self._transfers.upload_integers([self._storage[slot] for _, slot, _, _ in entries]),
            upload(drafts),
            upload(is_draft),
            upload(earlier),
        )

    def apply(self, logits: torch.Tensor, prepared: _Sequences) -> None:
        self._mask(logits, prepared, self._recent.index_select(0, prepared.storage))

    def apply_drafts(self, logits: torch.Tensor, prepared: _Sequences, drafts: DraftRows) -> None:
        """Each position follows the drafts before it."""
        recent = self._recent.index_select(0, prepared.storage).gather(1, prepared.earlier)
        self._mask(logits, prepared, torch.where(prepared.is_draft, drafts.fed[prepared.drafts], recent))

    def _mask(self, logits: torch.Tensor, prepared: _Sequences, output: torch.Tensor) -> None:
        """output: int64 [n, width], the tokens before the position of each entry."""
        matches = ((output == prepared.before) | ~prepared.matters).all(1)
        masked = torch.where(matches, float("-inf"), 0.0).to(logits.dtype)
        logits.index_put_((prepared.rows, prepared.last), masked, accumulate=True)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        if not self._storage or not self._width:
            return
        concerned = tuple((index, slot) for index, slot in enumerate(slots) if slot in self._storage)
        if not concerned:
            return
        indices, storage = self._observed.get(concerned, lambda: self._observers(concerned))
        recent = self._recent.index_select(0, storage)[:, 1:]
        self._recent.index_copy_(0, storage, torch.cat((recent, tokens.index_select(0, indices)[:, None]), 1))

    def _observers(self, concerned: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        indices = self._transfers.upload_integers([index for index, _ in concerned])
        return indices, self._transfers.upload_integers([self._storage[slot] for _, slot in concerned])

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        if not self._storage or not self._width:
            return
        runs = [(slot, [at for at, _ in run]) for slot, run in groupby(enumerate(slots), key=lambda pair: pair[1])]
        concerned = [(self._storage[slot], run) for slot, run in runs if slot in self._storage]
        if not concerned:
            return
        longest = max(len(run) for _, run in concerned)
        upload = self._transfers.upload
        storage = self._transfers.upload_integers([row for row, _ in concerned])
        positions = upload(np.array([run + run[-1:] * (longest - len(run)) for _, run in concerned], dtype=np.int64))
        used = upload(np.array([[at < len(run) for at in range(longest)] for _, run in concerned]))
        count = (kept[positions] & used).sum(1, keepdim=True)  # of kept tokens, which come first
        output = torch.cat((self._recent.index_select(0, storage), tokens[positions]), 1)
        places = count + torch.arange(self._width, device=self._transfers.device)
        self._recent.index_copy_(0, storage, output.gather(1, places))
