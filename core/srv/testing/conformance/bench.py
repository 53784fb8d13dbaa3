"""A bench for one attention backend: sequences over a real pool, every step compared with float64 on the host.

The backend writes all of the history itself, step by step, as it does under the engine; what it should hold is kept
here apart, so that a key written to the wrong place is seen when it is read. Pages are given out in shuffled order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, AttentionLayer
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import Setup, build, dtype_of, pool

PAGES = 96
# |got - want| <= first + second * |want|; room for a softmax in the dtype itself and for ten-bit products of float32.
TOLERANCES = {"float32": (2e-3, 2e-3), "bfloat16": (3e-2, 2e-2), "float16": (8e-3, 4e-3)}


@dataclass
class Row:
    """One row's history: its pages in order, and for each layer its keys and values, float64 [tokens, heads, dim]."""

    pages: list[int] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0


class Bench:
    """`window` and `soft_cap` are those of every layer; `wider_by`: columns of the page table past the longest row."""

    def __init__(
        self,
        kit: Kit,
        setup: Setup,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        wider_by: int = 0,
        seed: int = 0,
    ) -> None:
        self.kit, self.setup = kit, setup
        self.page_size = setup.layout.page_size
        self.kv = pool(kit, setup.layout, PAGES)
        self.backend: Any = build(kit, setup.spec, self.kv)
        self._generator = torch.Generator().manual_seed(seed)
        # Page 1 is given out first: who writes beside page 0 shall hit somebody.
        self._free = [*(torch.randperm(PAGES - 1, generator=self._generator) + 2).tolist(), 1]
        self._wider_by = wider_by
        shape = setup.shape
        self.layers = tuple(
            AttentionLayer(index, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, window, soft_cap)
            for index in range(len(setup.layout.group.layers))
        )

    def sequence(self, shared: Row | None = None, tokens: int = 0) -> Row:
        """A new row; with `shared`, its first `tokens` (whole pages) are that one's."""
        if shared is None:
            return Row()
        assert tokens % self.page_size == 0
        return Row(
            shared.pages[: tokens // self.page_size],
            {layer: keys[:tokens] for layer, keys in shared.keys.items()},
            {layer: values[:tokens] for layer, values in shared.values.items()},
            tokens,
        )

    def step(self, rows: Sequence[tuple[Row, int]], what: str, layers: Sequence[int] = (0,)) -> None:
        """Compute that many new tokens of each row in one step, and compare. Fault, naming `what`, if it is wrong."""
        batch = self.batch(rows)
        metadata = self.backend.plan(batch)
        for index in layers:
            q, k, v = self.inputs(sum(count for _, count in rows))
            got = self.forward(self.layers[index], q, k, v, metadata)
            self.compare(rows, index, (q, k, v), got, what)
        for row, count in rows:
            row.length += count

    def batch(self, rows: Sequence[tuple[Row, int]], graph: int | None = None, columns: int = 0) -> AttentionBatch:
        """The step as a backend sees it; pages for the new tokens are taken."""
        for row, count in rows:
            while len(row.pages) * self.page_size < row.length + count:
                row.pages.append(self._free.pop())
        width = max(columns, max(len(row.pages) for row, _ in rows) + self._wider_by)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for number, (row, _) in enumerate(rows):
            table[number, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        return AttentionBatch(
            [count for _, count in rows],
            [row.length + count for row, count in rows],
            table.to(self.kit.device),
            graph,
        )

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v on the host, of the setup's dtype. Queries are large, so that a lost token shows."""
        shape, dtype = self.setup.shape, dtype_of(self.setup.dtype)

        def random(heads: int, scale: float) -> Tensor:
            return (torch.randn(tokens, heads, shape.head_dim, generator=self._generator) * scale).to(dtype)

        q, k, v = random(shape.heads, 2.0), random(shape.kv_heads, 1.0), random(shape.kv_heads, 1.0)
        return (q, off_ties(k), off_ties(v)) if self.setup.layout.dtype == "int8" else (q, k, v)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        """What the backend gives, on the host. Fault if it is no tensor like q on the device."""
        device = self.kit.device
        out: object = self.backend.forward(layer, q.to(device), k.to(device), v.to(device), metadata)
        if not isinstance(out, Tensor):
            raise Fault(f"{self.setup}: forward gave a {type(out).__name__}, not a tensor")
        if not same_device(out.device, device):
            raise Fault(f"{self.setup}: forward gave its result on {out.device}, but the platform's device is {device}")
        if out.dtype != q.dtype or out.shape != q.shape:
            raise Fault(f"{self.setup}: forward gave {out.dtype} {tuple(out.shape)}, not {q.dtype} {tuple(q.shape)}")
        return out.to("cpu")

    def compare(
        self,
        rows: Sequence[tuple[Row, int]],
        index: int,
        given: tuple[Tensor, Tensor, Tensor],
        got: Tensor,
        what: str,
    ) -> None:
        """Enter the new keys and values into the rows' histories, and hold the result against the reference."""
        q, k, v = (part.double() for part in given)
        if self.setup.layout.dtype == "int8":
            k, v = as_bytes(k), as_bytes(v)
        ends = list(itertools.accumulate(count for _, count in rows))
        for number, ((row, count), end) in enumerate(zip(rows, ends, strict=True)):
            own = slice(end - count, end)
            row.keys[index] = torch.cat((row.keys.get(index, k[:0]), k[own]))
            row.values[index] = torch.cat((row.values.get(index, v[:0]), v[own]))
            want = reference(self.layers[index], q[own], row.keys[index], row.values[index])
            fault = difference(got[own], want, self.setup.dtype)
            if fault:
                length = len(row.keys[index])
                raise Fault(f"{what}: {self.setup}: row {number}, {count} queries over {length} tokens: {fault}")


def reference(layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last len(q) tokens of one row to all of it, float64 throughout.

    q: [queries, heads, dim]; keys, values: [tokens, kv_heads, dim]. Query heads h*n .. h*n+n-1 share KV head h.
    """
    sharing = layer.heads // layer.kv_heads
    keys, values = keys.repeat_interleave(sharing, dim=1), values.repeat_interleave(sharing, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None, :]
    hidden = distance < 0
    if layer.window is not None:
        hidden |= distance >= layer.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def off_ties(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], moved to where its rounding to a pool of int8 is the same in every type.

    The largest of each token's head becomes 127 steps of a power of two, the others a whole number of them, of which
    those up to 31 have a quarter of a step more or less, or none.
    """
    steps = torch.exp2((x.double().abs().amax(-1, keepdim=True) / 127).log2().ceil())
    count = x.double() / steps
    whole = count.round()
    quarters = ((count - whole) * 2).round() / 4
    moved = whole + torch.where(whole.abs() < 32, quarters, 0.0)
    largest = whole.abs().argmax(-1, keepdim=True)
    moved.scatter_(-1, largest, whole.gather(-1, largest).sign() * 127)
    return (moved * steps).to(x.dtype)


def as_bytes(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] as a pool of int8 keeps it: `KVLayout` says how it is rounded."""
    steps = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(steps == 0, 0.0, (x / steps).round() * steps)


def difference(got: Tensor, want: Tensor, dtype: str) -> str:
    """How far a result is from the reference, a clause; empty if it is near enough."""
    absolute, relative = TOLERANCES[dtype]
    error = (got.double() - want).abs()
    excess = (error - absolute - relative * want.abs()).nan_to_num(torch.inf)
    if bool((excess <= 0).all()):
        return ""
    worst = int(excess.argmax())
    return f"{got.flatten()[worst].item():.4g} where {want.flatten()[worst].item():.4g} is right"
