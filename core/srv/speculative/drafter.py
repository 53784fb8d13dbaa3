"""The drafter protocol: how tokens are proposed that the model verifies in its next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from srv.platform.transfers import Transfers
from srv.speculative.algorithm import DraftSizes


class DrafterContext(NamedTuple):
    """What a drafter is made with.

    `values`: of the arguments that its algorithm reads, by name. `max_drafts`: tokens per row that it is asked for, at
    most. `transfers`: has the device, and copies from the host to it.
    """

    values: Mapping[str, int]
    max_drafts: int
    sizes: DraftSizes
    transfers: Transfers


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts on the device, in stream order, and never synchronizes with it."""

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """int64 [rows, count]: the tokens that may follow, one after the other, each from 0 to the vocabulary size - 1.

        tokens: integers [rows, width], each row's prompt and output; what is beyond lengths[row] (int64 [rows], at
        least 1) is undefined. Neither may be written to. A wrong draft costs time, but never changes the output.
        """
