"""The drafter protocol: how tokens are proposed that the model verifies in its next step."""

from __future__ import annotations

from typing import Protocol

import torch


class Drafter(Protocol):
    """Proposes drafts on the device, in stream order, and never synchronizes with it."""

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """int64 [rows, count]: the tokens that may follow, one after the other.

        tokens: integers [rows, width], each row's prompt and output; what is beyond lengths[row] (int64 [rows], at
        least 1) is undefined. A wrong draft costs time, but never changes the output. Every id is one of the row's own.
        """
