"""Piecewise graphs: steps of any rows replay a forward pass that was captured in pieces, cut at attention.

    tokens, positions ──copied──► piece 0 ──► q, k, v ──► attention ──► out ──► piece 1 ──► … ──► last piece ──► hidden
                                  replayed                called as in an eager step                replayed

Pieces are captured for some numbers of tokens. A step is padded to the next one with token 0 at position 0. Attention
gets the true tokens only, with the metadata of the step, so that padding reaches no page of the KV pool; the layers
between two calls compute each token by itself. Selecting positions, the output layer and sampling come after the last
piece, as in an eager step.

A platform captures and replays a piece (`srv.platform.interface.Platform.graph_piece`). All pieces of all token counts
share one set of static buffers. This module must not know which steps exist beside those that it replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from srv.dist.agreement import StepShape
from srv.models.base import Attend, CausalLM, ForwardContext, ModelInputs
from srv.platform.interface import AttentionBackend, AttentionLayer
from srv.platform.transfers import Transfers
from srv.sched.plan import SlowReason
from srv.worker.batch import Inputs
from srv.worker.ways import CapturedCounts, Computed, ForwardStep, computed, step_attention

Replay = Callable[[], None]
CapturePiece = Callable[[], AbstractContextManager[Replay]]

_WARM_UPS = 2  # the first call loads kernels; by the second, all buffers are allocated


class Cut(NamedTuple):
    """One call of attention between two pieces. The tensors are static, and those of `srv.models.base.Attend`."""

    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class PieceBuffers:
    """Static inputs and outputs of pieces for up to `tokens` tokens; smaller steps use the first ones.

    Layers whose tensors have equal shapes use the same buffers, since each is read before the next layer writes it.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._most, self._device = tokens, device
        self.tokens = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._others: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def inputs(self, count: int) -> ModelInputs:
        return ModelInputs(self.tokens[:count], self.positions[:count])

    def fill(self, count: int, inputs: ModelInputs) -> None:
        """Copy the step's inputs, and pad them to `count` tokens."""
        pairs = (self.tokens[:count], inputs.tokens), (self.positions[:count], inputs.positions)
        for static, given in pairs:
            static[: len(given)].copy_(given)
            static[len(given) :].zero_()

    def like(self, name: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first `count` of the tensors of this name and shape (of one token). The first call allocates them."""
        key = name, dtype, tuple(shape)
        if key not in self._others:
            self._others[key] = torch.zeros((self._most, *shape), dtype=dtype, device=self._device)
        return self._others[key][:count]

    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.tokens, self.positions, *self._others.values()))


class _Cutter:
    """The `attend` of a forward pass of `count` tokens that computes no attention: it copies q, k and v, and cuts."""

    def __init__(self, buffers: PieceBuffers, count: int, cut: Callable[[], None]) -> None:
        self.cuts: list[Cut] = []
        self._buffers, self._count, self._cut = buffers, count, cut

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._buffers.like("out", self._count, (q.shape[1], layer.result_dim(v.shape[-1])), q.dtype)
        self.cuts.append(Cut(layer, self._keep("q", q), self._keep("k", k), self._keep("v", v), out))
        self._cut()
        return out

    def _keep(self, name: str, given: Tensor) -> Tensor:
        return self._buffers.like(name, self._count, given.shape[1:], given.dtype).copy_(given)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured forward pass: the pieces with a cut between any two, and the hidden states [tokens, hidden]."""

    pieces: list[Replay]
    cuts: list[Cut]
    hidden: Tensor


class PiecewiseSteps:
    """A way of steps: the forward pass of one model, captured for some numbers of tokens."""

    def __init__(
        self,
        model: CausalLM,
        attention: Sequence[AttentionBackend],
        capture_piece: CapturePiece,
        counts: Sequence[int],
        transfers: Transfers,
        *,
        padding: bool,
    ) -> None:
        """attention: the backend of each cache group, called between pieces. counts: numbers of tokens, ascending.

        padding: whether a step with fewer tokens is replayed as well.
        """
        self.counts = tuple(counts)
        self._counts = CapturedCounts(counts, padding=padding)
        self._model, self._capture_piece = model, capture_piece
        self._attention, self._transfers = attention, transfers
        with torch.inference_mode():
            self.buffers = PieceBuffers(self.counts[-1], transfers.device)
        self._captured: dict[int, _Captured] = {}

    def capture(self) -> float:
        """Capture every count, the largest first, so that smaller ones reuse memory; returns the seconds it took."""
        started = time.monotonic()
        with torch.inference_mode():
            for count in reversed(self.counts):
                self._captured[count] = self._capture(count)
        return time.monotonic() - started

    @property
    def pieces(self) -> int:
        """The number of captured pieces."""
        return sum(len(each.pieces) for each in self._captured.values())

    def _capture(self, count: int) -> _Captured:
        inputs = self.buffers.inputs(count)
        for _ in range(_WARM_UPS):
            self._hidden(count, self._model(inputs, ForwardContext(_Cutter(self.buffers, count, lambda: None))))
        pieces: list[Replay] = []
        with ExitStack() as piece:

            def begin() -> None:
                pieces.append(piece.enter_context(self._capture_piece()))

            def cut() -> None:
                piece.close()
                begin()

            cutter = _Cutter(self.buffers, count, cut)
            begin()
            hidden = self._hidden(count, self._model(inputs, ForwardContext(cutter)))
        return _Captured(pieces, cutter.cuts, hidden)

    def _hidden(self, count: int, computed: Tensor) -> Tensor:
        return self.buffers.like("hidden", count, computed.shape[1:], computed.dtype).copy_(computed)

    def covers(self, inputs: Inputs, shape: StepShape | None = None) -> bool:
        return self._counts.cover(inputs.model.tokens.numel())

    def run(self, step: ForwardStep) -> Computed:
        inputs = step.inputs
        hidden = self.replay(inputs.model, step_attention(self._attention, step, self._transfers))
        if inputs.vectors:
            hidden = hidden.clone()  # copies to the host may read it when the next step has begun
        return computed(self._model, inputs, hidden, "pieces")

    def why_not(self, inputs: Inputs) -> SlowReason:
        most = self.counts[-1]
        return "token_count_not_captured" if inputs.model.tokens.numel() <= most else "more_tokens_than_captured"

    def replay(self, inputs: ModelInputs, attend: Attend) -> Tensor:
        """Enqueue the forward pass of a step, whose token count is covered, with `attend`, its own attention.

        Returns the hidden states, [tokens, hidden], valid until the next replay in device order.
        """
        tokens = len(inputs.tokens)
        count = self._counts.next(tokens)
        captured = self._captured[count]
        self.buffers.fill(count, inputs)
        for piece, (layer, q, k, v, out) in zip(captured.pieces, captured.cuts, strict=False):
            piece()
            out[:tokens].copy_(attend(layer, q[:tokens], k[:tokens], v[:tokens]))
        captured.pieces[-1]()
        return captured.hidden[:tokens]
