"""The logits processor of late inputs: masks that the host makes while the forward pass runs (`srv.sched.late`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from srv.platform.transfers import Transfers
from srv.sample.processors import SampleRow
from srv.sample.verify import DraftRows
from srv.sched.late import LateInputs
from srv.sched.plan import Start
from srv.types import SamplingParams

# Indices of rows, int64 [n], or None for all rows; whether each token is forbidden, bool [n, vocab].
_Masked = tuple[torch.Tensor | None, torch.Tensor]


class LateMasks:
    """Applies the masks of one step: those between `set` and `clear`. Other steps have none."""

    def __init__(self, vocab_size: int, transfers: Transfers) -> None:
        self._vocab_size, self._transfers = vocab_size, transfers
        self._masks: dict[int, bytes] = {}

    def set(self, late: LateInputs) -> None:
        self._masks = dict(late.masks)

    def clear(self) -> None:
        """The step is enqueued. Its masks must not be applied to the next one, whose slots may have other requests."""
        self._masks = {}

    def start(self, start: Start, params: SamplingParams) -> None:
        """Masks come with each step."""

    def end(self, slot: int) -> None:
        """See `start`."""

    def prepare(self, rows: Sequence[SampleRow]) -> _Masked | None:
        if not self._masks:
            return None
        masked = [(index, self._masks[row.slot]) for index, row in enumerate(rows) if row.slot in self._masks]
        if not masked:
            return None
        packed = np.stack([~np.frombuffer(mask, dtype=np.uint8) for _, mask in masked])
        forbidden = np.unpackbits(packed, axis=1, count=self._vocab_size, bitorder="little").view(bool)
        indices = None
        if len(masked) < len(rows):
            indices = self._transfers.upload_integers([index for index, _ in masked])
        return indices, self._transfers.upload(forbidden)

    def apply(self, logits: torch.Tensor, prepared: _Masked) -> None:
        rows, forbidden = prepared
        if rows is None:
            logits.masked_fill_(forbidden, float("-inf"))
        else:
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))

    def apply_drafts(self, logits: torch.Tensor, prepared: _Masked, drafts: DraftRows) -> None:
        """Rows with a mask have no drafts."""
        self.apply(logits, prepared)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """The host makes the next mask."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""
