"""The live side of the platform contract: what `Manifest.create` returns, and what backends implement.

Version 1 has the members that core calls today, no more; a new one comes as a minor version, together with
its first caller. Objects here exist in worker processes only. This is the one module of the package that
knows torch's types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from srv.memory.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device, as its driver (or operating system) reports them now."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a diagnosis: what was looked at, whether it is well, what was seen, what to do."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


class Event(Protocol):
    """A point in a device's stream of work."""

    def synchronize(self) -> None:
        """Block this thread until everything enqueued before the event is done."""


@dataclass(frozen=True, slots=True)
class OpArgs:
    """What an op will be called with, known when the model is built: enough to choose an implementation."""

    dtype: torch.dtype
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One implementation of an op of `srv_kernels.contracts`.

    `supports_args(args)` gives None, or the reason against it. `target` is the callable itself or
    "module:function", imported when first bound.
    """

    op: str
    name: str
    supports_args: Callable[[OpArgs], str | None]
    target: Callable[..., Any] | str


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """The KV pool of one cache group: for each of its layers, a key and a value buffer.

    Shapes as `layout.order` says, with `pages + 1` pages, dtype `layout.dtype`, on the platform's device. Together they
    take `layout.bytes_per_page()` bytes a page, or more.
    """

    layout: KVLayout
    pages: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a backend must know of one attention layer; `index` counts within its cache group.

    `scale` multiplies q.k; `window`: None, or a token sees itself and the `window - 1` before it;
    `soft_cap`: None, or scores become soft_cap * tanh(scores / soft_cap).
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step, seen by attention. Rows lie one after the other in the token axis.

    query_lens[i] >= 1 tokens of row i are computed now; kv_lens[i] counts its tokens including those, so
    its first query has position kv_lens[i] - query_lens[i]. Both are host integers.
    page_table: int32 [rows, columns] on the device; entries past a row's last page are 0.
    graph (contract 1.1): None, or the number of rows of a captured shape, which is then the number of rows
    here. Every query length is 1, `page_table` is at the same address and as wide as any context in every
    such batch, and rows without a request have page 0 alone and a kv length of 1. For one value of `graph`
    the metadata of `plan` keeps its device tensors at the same addresses (it copies into them), so that a
    captured kernel may read them.
    """

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: torch.Tensor
    graph: int | None = None


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend of any family is built from."""

    platform: Platform
    device: torch.device
    kv: KVBuffers | None
    max_rows: int
    max_tokens: int


class AttentionBackend(Protocol):
    """Built once for a cache group from `BackendContext`; `plan` once a step, `forward` once a layer."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step, outside any graph. The result is opaque to core and handed to `forward`."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Write k and v into the pool, then attend causally over each row's pages.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of the model's dtype.
        Returns [tokens, heads, head_dim], of q's dtype. Where the pool's values are of another length than its keys,
        head_dim is that of q and k, and the last axis of v and of the result is the layout's `value_dim`.
        """


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Rows to draw from, after all logits processors. Device tensors, one entry a row.

    logits: float32 [rows, vocab]. temperature: float32 (0: greedy, taken by argmax). top_k: int32
    (vocab size: all). top_p, min_p: float32. uniform: float64 in [0, 1), the row's counter-based noise.
    The flags are host knowledge that lets a backend leave work out.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    largest_top_k: int


class SamplingBackend(Protocol):
    """Built once from `BackendContext`."""

    def sample(self, batch: SamplingBatch) -> torch.Tensor:
        """int64 [rows]: one token a row.

        Filters apply in the order temperature, top-k, top-p, min-p; the token drawn is the first, in the
        backend's own fixed order of the kept tokens, whose cumulative probability exceeds `uniform`.
        Equal logits and equal noise give equal tokens, whatever else is in the batch.
        """


@runtime_checkable
class GreedySampling(SamplingBackend, Protocol):
    """A sampling backend with a shorter way where every row takes its most likely token (contract 1.2)."""

    def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows]: what `sample` gives rows of temperature 0; bool [rows]: whether the row's logits are finite.

        logits: [rows, vocab] of the model's dtype, unchanged. They are not finite where one is NaN or +inf, or none is
        above -inf: the row's token is then 0.
        """


class Graphs(Protocol):
    """Captured steps of one worker process (contract 1.1).

    Core captures while the engine starts, the largest key first, and replays on the thread that runs steps; both
    in torch's inference mode. It keeps no result past the next replay, so that all keys may share one memory.
    """

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `run`; gives its output, whose storage every replay writes. Before the first it may hold anything.

        `run` may be called more than once. It reads and writes the same storages each time, and waits for
        nothing: no copy to the host, no event. Memory that it takes belongs to the graph from then on.
        """

    def replay(self, key: int, metadata: Any) -> None:
        """Enqueue what was recorded under `key`, with the host lengths of this step's attention metadata applied.

        `metadata` is what the attention backend's `plan` gave for a batch with `graph=key`, just before. Where
        steps overlap, the last replay of `key` may still be running.
        """


@runtime_checkable
class Platform(Protocol):
    """A platform at work in one worker process."""

    @property
    def name(self) -> str: ...

    def device(self, local_rank: int) -> torch.device:
        """The torch device of a rank on this host."""

    def init_worker(self, rank: int) -> None:
        """Make this process ready to compute: select the device, set thread counts, load libraries."""

    def memory(self, device: torch.device) -> Memory:
        """Memory of the device now."""

    def record_event(self, device: torch.device) -> Event:
        """Mark the present end of the device's default stream."""

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Allocate a KV pool, zeroed where reading unwritten memory could give NaN."""

    @property
    def ops(self) -> Sequence[OpImpl]:
        """Op implementations, best first. An op that no implementation supports is an error at start."""

    @property
    def graphs(self) -> Graphs | None:
        """Captured steps, or None where there are none (contract 1.1; absent from a plugin of 1.0)."""

    def post_load(self, model: torch.nn.Module) -> None:
        """Weights are loaded and on the device: repack, cast formats, free what is left over."""

    def diagnose(self) -> list[Check]:
        """Look at this machine for `srv doctor`: driver, toolkit, a small real computation."""
