"""Late inputs: what a step needs from the host after its forward pass has been submitted. Imports no torch.

A grammar allows tokens that depend on the token before, which the host knows one step later than the device. A step
with a row that waits for such an input has two phases, and two steps are in flight all the same:

    loop     submit(n)   apply(n-1)   inputs from its tokens   sample(n)   submit(n+1)   apply(n) ...
    device   ├──────── forward n ────────────────────────────┤├ sample n ┤├─ forward n+1 ─ ...

A row that waits has no drafts: the host does not know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from srv.types import RequestSpec


class LateRow(NamedTuple):
    """A row that waits: its slot, its request, and the request's output so far, complete up to the token to sample."""

    slot: int
    request: RequestSpec
    output: Sequence[int]


class LateInputs(NamedTuple):
    """`masks`: (slot, allowed) pairs; `allowed` has one bit per token id, the lowest first, 1 if it may be sampled.

    Every rank of an engine gets the same bytes.
    """

    masks: tuple[tuple[int, bytes], ...] = ()


class LateInputMaker(Protocol):
    """Makes late inputs, on the engine loop's thread. It must not raise."""

    def concerns(self, request: RequestSpec) -> bool:
        """Whether the rows of this request wait for late inputs. Asked once, when the request is added."""

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        """The late inputs of one step."""
