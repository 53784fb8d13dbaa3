"""Vectors instead of tokens: the embeddings of pooled prompts, and hidden states that a request asked for.

Owns the running sums of prompts that are computed in several steps, and the copies to the host. Must not know models or
scheduling, and never synchronizes with the device.

    hidden states of the step ─┬─► one token, or sum per slot ─┬─► dense layers ──► cut ──► L2 norm ──► host
                               │                               └─► logits of labels or tokens ────────► host
                               └─► as they are ───────────────────────────────────────────────────────► host
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, assert_never

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.transfers import Transfers
from srv.sched.plan import NON_FINITE_HIDDEN_STATES, Start
from srv.types import PooledOutput, Pooling, PoolingParams

# From pooled hidden states, float32 [n, hidden], and the parameters of the n requests, to what is returned for each of
# them, float32 [elements]. Called once per step for all requests with the same output.
Finish: TypeAlias = Callable[[Tensor, Sequence[PoolingParams]], Sequence[Tensor]]

NON_FINITE = (
    NON_FINITE_HIDDEN_STATES,
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
        return [None if value is None else _bytes(value) for value in self.values]


class Pooler:
    """The state of each slot whose request has PoolingParams. Used from one thread."""

    def __init__(self, transfers: Transfers, finishes: Mapping[PooledOutput, Finish] | None = None) -> None:
        """`finishes`: what is done with pooled hidden states; by default, embeddings are cut and normalised."""
        self._transfers = transfers
        self._finishes: Mapping[PooledOutput, Finish] = {
            PooledOutput.EMBEDDING: finished_embeddings,
            **(finishes or {}),
        }
        self._params: dict[int, PoolingParams] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}  # float32 [hidden] on the device, of prompts that are not complete

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
        values: list[Tensor | None] = [None] * len(rows)
        complete: defaultdict[PooledOutput, dict[int, Tensor]] = defaultdict(dict)
        for index, row in enumerate(rows):
            rows_, params = hidden[row.begin : row.end], self._params.get(row.slot)
            if params is None:
                values[index] = rows_.float()
            elif (pooled := self._pooled(rows_, row, params.pooling)) is not None:
                complete[params.output][index] = pooled
        for output, together in complete.items():
            finish = self._finishes.get(output)
            if finish is None:
                raise InternalError(f"a request asks for {output.value}, which this rank does not compute")
            row_params = [self._params[rows[index].slot] for index in together]
            finished = finish(torch.stack(list(together.values())), row_params)
            for index, value in zip(together, finished, strict=True):
                values[index] = value
        return Vectors(tuple(None if vector is None else self._transfers.download(vector) for vector in values))

    def _pooled(self, hidden: Tensor, row: VectorRow, pooling: Pooling) -> Tensor | None:
        """The pooled hidden states of a prompt, float32 [hidden]; None if it goes on after this row."""
        count = self._prompt_tokens[row.slot]
        complete = row.computed == count
        if pooling is Pooling.LAST:
            return hidden[-1].float() if complete else None
        total = self._so_far(hidden, row, pooling)
        if not complete:
            self._sums[row.slot] = total
            return None
        divisor = _divisor(pooling, count)
        return total if divisor == 1 else total / divisor

    def _so_far(self, hidden: Tensor, row: VectorRow, pooling: Pooling) -> Tensor:
        """What a prompt has been pooled to up to the end of this row, before it is divided: float32 [hidden]."""
        before = self._sums.get(row.slot)
        if pooling is Pooling.CLS:
            return hidden[0].float() if before is None else before
        if pooling is Pooling.MAX:
            largest = hidden.amax(0).float()
            return largest if before is None else torch.maximum(largest, before)
        if pooling is Pooling.WEIGHTED_MEAN:
            first = row.computed - len(hidden) + 1
            weights = torch.arange(first, row.computed + 1, dtype=torch.float32, device=hidden.device)
            total = weights @ hidden.float()
        else:
            total = hidden.sum(0, dtype=torch.float32)
        return total if before is None else total + before


def _divisor(pooling: Pooling, tokens: int) -> float:
    """What a prompt's sum is divided by."""
    match pooling:
        case Pooling.MEAN:
            return tokens
        case Pooling.WEIGHTED_MEAN:
            return tokens * (tokens + 1) / 2
        case Pooling.MEAN_SQRT_LEN:
            return math.sqrt(tokens)
        case Pooling.CLS | Pooling.MAX | Pooling.LAST:
            return 1
        case _ as never:
            assert_never(never)


def finished_embeddings(pooled: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
    """pooled: float32 [n, elements]. Each is cut to its leading dimensions before the norm, so that it has length 1."""
    cut = [row[: param.dimensions] for row, param in zip(pooled, params, strict=True)]
    return [
        row / row.norm().clamp_min(_SMALLEST_NORM) if param.normalize else row
        for row, param in zip(cut, params, strict=True)
    ]


def _bytes(value: Tensor) -> bytes:
    return value.numpy().astype("<f4", copy=False).tobytes() if bool(value.isfinite().all()) else b""
