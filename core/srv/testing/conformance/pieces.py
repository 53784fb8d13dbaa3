"""L2: pieces of a captured forward pass, replayed with other inputs and work between them that is not captured.

    x ──► piece: y = x * weight, q = y @ matrix ──► out = the cumulative sum of q ──► piece: z = relu(y + out) ──► z
                                                          not captured, for the true tokens

Results have the bits of the same work without a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.setups import declared_dtypes, dtype_of

COUNTS = (12, 5)  # tokens of the captured passes, the largest first, as in the engine
WIDTH = 64
_STEPS = ((12, 12), (5, 5), (12, 7), (12, 11), (5, 2), (5, 5), (12, 12))  # captured tokens, and those of the step


@dataclass(frozen=True)
class _Pass:
    """A captured pass of `count` tokens: its pieces, and the static tensors, each [count, WIDTH]."""

    pieces: list[Callable[[], None]]
    x: Tensor
    q: Tensor
    out: Tensor
    z: Tensor


class _Work:
    """The work above, captured and not."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self._generator = torch.Generator().manual_seed(0)
        self.dtype = dtype_of(declared_dtypes(kit)[0])
        self._weight, self._matrix = self.random(1), self.random(WIDTH)
        with torch.inference_mode():
            static = [torch.zeros(COUNTS[0], WIDTH, dtype=self.dtype, device=kit.device) for _ in range(4)]
            self.passes = {count: self._capture(*(tensor[:count] for tensor in static)) for count in COUNTS}

    def random(self, rows: int) -> Tensor:
        """[rows, WIDTH] on the device."""
        return torch.randn(rows, WIDTH, generator=self._generator).to(self.dtype).to(self.kit.device)

    def _first(self, x: Tensor, q: Tensor) -> Tensor:
        y = x * self._weight
        q.copy_(y @ self._matrix)
        return y

    def _capture(self, x: Tensor, q: Tensor, out: Tensor, z: Tensor) -> _Pass:
        for _ in range(2):  # kernels are loaded
            z.copy_((self._first(x, q) + out).relu())
        self.kit.synchronize()
        first: AbstractContextManager[Callable[[], None]] = self.kit.platform.graph_piece()
        with first as replay_first:
            y = self._first(x, q)
        out.copy_(q.cumsum(0))
        with self.kit.platform.graph_piece() as replay_second:
            z.copy_((y + out).relu())
        return _Pass([replay_first, replay_second], x, q, out, z)

    def replay(self, count: int, x: Tensor) -> Tensor:
        """The result for `x`, [tokens, WIDTH], padded to `count` tokens."""
        captured, tokens = self.passes[count], len(x)
        captured.x[:tokens].copy_(x)
        captured.x[tokens:].zero_()
        captured.pieces[0]()
        captured.out[:tokens].copy_(captured.q[:tokens].cumsum(0))
        captured.pieces[1]()
        return captured.z[:tokens].clone()

    def expected(self, count: int, x: Tensor) -> Tensor:
        """The same without a capture. Products have `count` rows here too: their bits may depend on that."""
        padded, out = (torch.zeros(count, WIDTH, dtype=self.dtype, device=self.kit.device) for _ in range(2))
        padded[: len(x)].copy_(x)
        q = torch.empty_like(padded)
        y = self._first(padded, q)
        out[: len(x)].copy_(q[: len(x)].cumsum(0))
        return (y + out).relu()[: len(x)]


def pieces(kit: Kit) -> str:
    """All steps are launched before the first result is read."""
    work = _Work(kit)
    with torch.inference_mode():
        inputs = [(count, work.random(tokens)) for count, tokens in _STEPS]
        results = [work.replay(count, x) for count, x in inputs]
        kit.synchronize()
        for (count, x), result in zip(inputs, results, strict=True):
            expected = work.expected(count, x)
            kit.synchronize()
            if not torch.equal(result.to("cpu"), expected.to("cpu")):
                error = (result - expected).abs().max().item()
                raise Fault(
                    f"pieces of {count} tokens, replayed for a step of {len(x)}, differ by up to {error:.3g} from the "
                    "same work without a capture"
                )
    return f"{len(_STEPS)} passes of two pieces, for {' and '.join(map(str, COUNTS))} tokens, have the same bits"
