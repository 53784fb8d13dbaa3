"""Late inputs: what a step needs from the host after its forward pass has been submitted. Imports no torch.

A grammar allows tokens that depend on the token before, which the host knows one step later than the device. A step
with a row that waits for such an input has two phases, and two steps are in flight all the same:

    loop     submit(n)   apply(n-1)   inputs from its tokens   sample(n)   submit(n+1)   apply(n) ...
    device   ├──────── forward n ────────────────────────────┤├ sample n ┤├─ forward n+1 ─ ...

A row that waits has no drafts: the host does not know them. A request that needs no late inputs any more is like any
other from its next row on (`LateInputs.settled`).

What allows a single token tells the token before it is sampled, and so on for the tokens after it. If at least two are
forced, the next row of the request computes all of them at once, and samples what follows (jump-forward):

    allowed      {a}   {b}   {c}   {d, e, ...}
    row n        samples a; its late input says that a, b, c are forced
    row n + 1    computes a, b, c and samples after c, so that b and c take no step of their own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from srv.types import RequestSpec


class LateRow(NamedTuple):
    """A row that waits: its slot, its request, and the request's output so far, complete up to the token to sample.

    The output includes the forced tokens of the row, which no client has received yet.
    """

    slot: int
    request: RequestSpec
    output: Sequence[int]


class LateInputs(NamedTuple):
    """`masks`: (slot, allowed) pairs; `allowed` has one bit per token id, the lowest first, 1 if it may be sampled.

    Every rank of an engine gets the same bytes.
    `forced`: (slot, tokens) pairs for the scheduler: the token that the row samples, because nothing else is allowed,
    and at least one more that must follow it. The scheduler may pass over some or all of them.
    `failed`: (request, code, message) of requests that cannot go on. They end with this error.
    `slow`: requests whose next late input may take long. They get no row until it is ready (`Scheduler.resume`).
    `settled`: requests that no late input concerns any more, whatever they generate.
    """

    masks: tuple[tuple[int, bytes], ...] = ()
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    settled: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


class LateInputMaker(Protocol):
    """Makes late inputs, on the engine loop's thread. It must not raise."""

    def concerns(self, request: RequestSpec) -> bool:
        """Whether the rows of this request wait for late inputs until it settles. Asked once, when it is added."""

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        """The late inputs of one step."""
