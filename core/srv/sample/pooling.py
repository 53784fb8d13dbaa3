"""Vectors instead of tokens: the embeddings of pooled prompts, and hidden states that a request asked for.

Owns the running sums of prompts that are computed in several steps, and the copies to the host. Must not know models or
scheduling, and never synchronizes with the device.

    hidden states of the step ──► last token, or sum per slot ──► cut ──► L2 norm ──► host
                          └─────► as they are ───────────────────────────────────────► host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from srv.platform.transfers import Transfers
from srv.sched.plan import Start
from srv.types import Pooling, PoolingParams

NON_FINITE = (
    "non_finite_hidden_states",
    "The model computed no finite hidden states for this request. Other requests are unharmed; try a wider dtype if "
    "it happens again.",
)
_SMALLEST_NORM = 1e-12  # a vector of zeros stays one


class VectorRow(NamedTuple):
    """A row with vectors: its slot, its range [begin, end) of token-axis indices, and the positions computed so far.

    `computed` counts from the first position of the prompt to the end of this row.
    """

    slot: int
    begin: int
    end: int
    computed: int


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of a step. The tensors are on the host, or are being copied there asynchronously.

    `values[i]`: float32 [n, hidden] or [hidden], of row i; None while its prompt is not complete. Call `to_host` only
    when the work that is enqueued on the device's stream has finished.
    """

    values: tuple[Tensor | None, ...]

    def to_host(self) -> list[bytes | None]:
        """Little-endian float32 per row; empty bytes if a value is not finite."""
        return [None if each is None else _bytes(each) for each in self.values]


class Pooler:
    """The state of each slot whose request has PoolingParams. Used from one thread."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._params: dict[int, PoolingParams] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}  # float32 [hidden] on the device, for mean pooling

    def start(self, start: Start) -> None:
        """Start a request in a slot. Replaces state that the slot still has after a failed step."""
        self.end(start.slot)
        if isinstance(start.request.params, PoolingParams):
            self._params[start.slot] = start.request.params
            self._prompt_tokens[start.slot] = len(start.request.tokens)

    def end(self, slot: int) -> None:
        self._params.pop(slot, None)
        self._prompt_tokens.pop(slot, None)
        self._sums.pop(slot, None)

    def pool(self, hidden: Tensor, rows: Sequence[VectorRow]) -> Vectors:
        """hidden: [T, hidden] of the model's dtype, after the last norm. Rows without PoolingParams return theirs."""
        values = [self._value(hidden[row.begin : row.end], row) for row in rows]
        return Vectors(tuple(None if each is None else self._transfers.download(each) for each in values))

    def _value(self, hidden: Tensor, row: VectorRow) -> Tensor | None:
        params = self._params.get(row.slot)
        if params is None:
            return hidden.float()
        count = self._prompt_tokens[row.slot]
        if params.pooling is Pooling.MEAN:
            total = hidden.sum(0, dtype=torch.float32)
            if row.slot in self._sums:
                total += self._sums[row.slot]
            self._sums[row.slot] = total
            pooled = total / count
        else:
            pooled = hidden[-1].float()
        return _finished(pooled, params) if row.computed == count else None


def _finished(pooled: Tensor, params: PoolingParams) -> Tensor:
    """pooled: float32 [hidden]. Cut to the leading dimensions before the norm, so that the result has length 1."""
    cut = pooled[: params.dimensions]
    return cut / cut.norm().clamp_min(_SMALLEST_NORM) if params.normalize else cut


def _bytes(value: Tensor) -> bytes:
    return value.numpy().astype("<f4", copy=False).tobytes() if bool(value.isfinite().all()) else b""
