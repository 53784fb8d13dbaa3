"""The logits processor of late inputs: masks that the host makes while the forward pass runs (`srv.sched.late`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from srv.platform.transfers import Transfers
from srv.sample.processors import SampleRow
from srv.sample.verify import DraftRows
from srv.sched.late import LateInputs
from srv.sched.plan import Start
from srv.types import SamplingParams

# Indices of rows, int64 [n], or None for all rows; the masks of these rows, uint8 [n, bytes].
_Masked = tuple[torch.Tensor | None, torch.Tensor]


def _highest_by_byte() -> torch.Tensor:
    """The highest logits of 8 tokens for each byte of a mask, float32 [256, 8]: infinity, or -infinity if forbidden.

    Looking up eight tokens at a time and taking the minimum costs a tenth of `masked_fill_` on a CPU, and packed masks
    are an eighth of the bytes to upload.
    """
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(allowed, np.float32(np.inf), np.float32(-np.inf)))


class LateMasks:
    """Applies the masks of one step: those between `set` and `clear`. Other steps have none."""

    def __init__(self, vocab_size: int, transfers: Transfers) -> None:
        self._vocab_size, self._transfers = vocab_size, transfers
        self._highest = transfers.upload(_highest_by_byte())
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
        packed = np.stack([np.frombuffer(mask, dtype=np.uint8) for _, mask in masked])
        indices = None
        if len(masked) < len(rows):
            indices = self._transfers.upload_integers([index for index, _ in masked])
        return indices, self._transfers.upload(packed)

    def apply(self, logits: torch.Tensor, prepared: _Masked) -> None:
        rows, packed = prepared
        highest = F.embedding(packed.to(torch.int32), self._highest).flatten(1)[:, : self._vocab_size]
        if rows is None:
            torch.minimum(logits, highest, out=logits)
        else:
            logits.index_copy_(0, rows, torch.minimum(logits.index_select(0, rows), highest))

    def apply_drafts(self, logits: torch.Tensor, prepared: _Masked, drafts: DraftRows) -> None:
        """Rows with a mask have no drafts."""
        self.apply(logits, prepared)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """The host makes the next mask."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""
