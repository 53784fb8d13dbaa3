"""Each slot's tokens and true length on the device: what a drafter reads, and where rows with drafts begin.

    tokens[slot]     int32 [width], prompt and output; what is beyond the length is undefined
    lengths[slot]    int64, the number of known tokens, the last sampled one included

The host knows a length only when the results of all rows with drafts have been applied; the device always does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from srv.platform.transfers import Transfers
from srv.sample.verify import DraftShape
from srv.sched.plan import Start


class Histories:
    """Histories of `slots` slots, of at most `width` tokens each."""

    def __init__(self, slots: int, width: int, transfers: Transfers) -> None:
        device, self._transfers = transfers.device, transfers
        self.tokens = torch.zeros((slots, width), dtype=torch.int32, device=device)
        self.lengths = torch.ones(slots, dtype=torch.int64, device=device)

    def start(self, start: Start) -> None:
        known = np.asarray(start.tokens, dtype=np.int32)
        self._transfers.update(self.tokens[start.slot, : len(known)], torch.from_numpy(known))
        self.lengths[start.slot] = len(known)

    def extend(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """The slot's tokens from this position on, up to the last known one."""
        end = position + len(tokens)
        self._transfers.update(self.tokens[slot, position:end], torch.tensor(tokens, dtype=torch.int32))
        self.lengths[slot] = end

    def append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append one token, int64 [rows], to each of these slots, int64 [rows]."""
        self.tokens.index_put_((slots, self.lengths[slots]), tokens.int())
        self.lengths[slots] += 1

    def append_accepted(
        self, slots: torch.Tensor, shape: DraftShape, tokens: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Append the first accepted[row] of each row's sampled tokens, int64 [n]. The others are written behind them,
        where they do not count.
        """
        places = shape.positions(self.lengths[slots])
        self.tokens.index_put_((shape.per_position(slots), places), tokens.int())
        self.lengths[slots] += accepted
