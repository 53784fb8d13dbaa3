"""The live side of the platform contract: what `Manifest.create` returns, and what backends implement.

The contract has only the members that core calls today. A new member comes with a minor version, together
with its first caller. Objects of these types exist in worker processes only. This is the one module of the
package that uses torch's types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from srv.dist.group import RankGroup
from srv.dtypes import KVScales
from srv.errors import InternalError
from srv.platform.streams import Streams
from srv.platform.transfers import Transfers
from srv.specs import AttentionLayer as AttentionLayer
from srv.specs import KVLayout, spec_name


@dataclass(frozen=True, slots=True)
class Memory:
    """Free and total bytes of one device, as its driver (or operating system) reports them now.

    A device that computes in host memory gives each of the ranks on this host an equal share.
    """

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that this process has allocated on one device: `now`, and at most since the peak was last reset.

    `peak` None: there is no figure that means the memory of steps.
    """

    now: int
    peak: int | None


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a diagnosis: what was checked, whether it passed, the observed value, and a remedy."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class OpArgs:
    """Dtype and sizes of an op's calls, known when the model is built: enough to choose an implementation."""

    dtype: torch.dtype
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One implementation of an op of `srv_kernels.contracts`.

    `supports_args(args)` returns None, or the reason why the implementation cannot be used. `target` is the
    callable itself or "module:function", which is imported when the op is first bound. `batch_invariant`: a row's
    result has the same bits with any other rows in the call; only such implementations are bound with
    --enable-deterministic-inference. `rounds`: as that of an `OpSpec`.
    """

    op: str
    name: str
    supports_args: Callable[[OpArgs], str | None]
    target: Callable[..., Any] | str
    batch_invariant: bool = False
    rounds: str = ""


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """The pool of one cache group: for each of `layout.names()`, one tensor per layer of `layout.layers_of`.

    `layout` says what the first axis counts (pages, or slots of a recurrent group) and that it has one entry more than
    was requested. The device is the platform's. No two tensors share memory. Together they take at least the bytes that
    `layout` states per page or slot.
    """

    layout: KVLayout
    tensors: Mapping[str, tuple[torch.Tensor, ...]]

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """The keys of each layer of an attention group. Raises InternalError for other groups."""
        return self._named("key")

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The values of each layer of an attention group. Raises InternalError for other groups."""
        return self._named("value")

    def scales(self, index: int) -> KVScales:
        """What keys and values of the layer with this index in the group are divided by; 1 without `layout.scales`."""
        return self.layout.scales[index] if self.layout.scales else KVScales()

    def all(self) -> Iterator[torch.Tensor]:
        """Every tensor, in the order of `layout.names()`."""
        for name in self.layout.names():
            yield from self.tensors[name]

    def _named(self, name: str) -> tuple[torch.Tensor, ...]:
        if name not in self.tensors:
            kind, names = spec_name(self.layout.group), ", ".join(self.tensors)
            raise InternalError(f"the pool of a {kind} cache group has no tensors named {name}, but {names}")
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The attention inputs of one step. Rows are concatenated along the token axis.

    lengths: int32 [rows] on the device, or None. If given, the KV lengths are these; kv_lens[i] is then
    only an upper bound, because drafts in flight may be rejected. A backend gets them only if its spec says
    `lengths="device"`.
    query_lens[i] >= 1 tokens of row i are computed in this step; kv_lens[i] counts its tokens including those,
    so its first query has position kv_lens[i] - query_lens[i]. Both are host integers.
    page_table: int32 [rows, columns] on the device; entries past a row's last page are 0. In a group with a sliding
    window, pages behind it may be any others: what they hold, NaN included, must not change the result.
    graph: None, or the number of rows of a captured shape, which is then the number of rows of
    this batch. Every query length is 1; `page_table` is at the same address in every such batch and wide enough
    for any context; padding rows (without a request) have page 0 only and a KV length of 1. For one value of
    `graph` the metadata returned by `plan` keeps its device tensors at the same addresses (`plan` copies into
    them), so that a captured kernel may read them.
    """

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: torch.Tensor
    graph: int | None = None
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The constructor argument of a backend of any family.

    `max_rows`: the most rows that one step may have; for a sampling backend, the most rows of logits. `transfers`:
    host values that a step needs on the device go through its `upload` or `update`. `arguments`: the resolved values of
    the server arguments that `BackendSpec.arguments` names.
    """

    platform: Platform
    device: torch.device
    kv: KVBuffers | None
    max_rows: int
    transfers: Transfers
    arguments: Mapping[str, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """Built per cache group from a `BackendContext`; `plan` runs once per step, `forward` once per layer.

    Before weights are read, a first one over a pool of one page is asked `supports`; another one then serves.
    """

    def supports(self, layer: AttentionLayer) -> str | None:
        """None, or why this backend cannot compute such a layer: a clause ("head_dim 80 is not a multiple of 16").

        It must agree with `BackendSpec.traits`. `forward` is called with layers that it supports, and those whose
        window, no shorter than the model's context, hides nothing.
        """

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare one step, outside any graph. Core does not look into the result; it passes it to `forward`."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Write k and v of all rows into the pool, then attend causally over each row's pages.

        Of a bidirectional layer, nothing is written: it has no place in the pool, and each row is a whole sequence,
        whose tokens attend to one another (`AttentionLayer.bidirectional`).

        Rows may share pages that the same step writes: row i may attend to keys and values of row j. The captured steps
        of rows with drafts do so; there, each token is a row of its own.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], in the model's dtype. Each may be a view of a
        wider tensor, as a fused projection returns it: a row is contiguous, but does not follow the one before it.
        Returns [tokens, heads, head_dim] in q's dtype. Where values have another head size than keys, head_dim
        is that of q and k, and the last axis of v and of the result is the group's `value_dim`.
        Of what it is given, only the pool may be written. The result is a new tensor: later calls, for other layers or
        steps, must not overwrite it.
        """


@runtime_checkable
class NamesWriter(AttentionBackend, Protocol):
    """An attention backend that says which `OpSpec` of op "write_kv" writes keys and values into pages."""

    kv_writer: str


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Rows to sample from, after all logits processors. Device tensors with one entry per row.

    logits: float32 [rows, vocab]. temperature: float32 (0: greedy, by argmax). top_k: int32
    (vocab size: no limit). top_p, min_p: float32. uniform: float64 in [0, 1), the row's counter-based noise.
    The `all_*` and `any_*` flags and `largest_top_k` are host values that let a backend skip work.
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
        """int64 [rows]: one token per row.

        Filters apply in the order temperature, top-k, top-p, min-p. Of equal logits at the limit of top-k, it may keep
        those that fit, whichever they are, or all. The sampled token is the first one, in the
        backend's own fixed order of the kept tokens, with a cumulative probability above `uniform`.
        Equal logits and equal noise give equal tokens, whatever other rows the batch has. Later calls must not
        overwrite the result.
        """


@runtime_checkable
class GreedySampling(SamplingBackend, Protocol):
    """A sampling backend with a shortcut, which it may leave out, for batches in which every row is greedy."""

    def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows]: the result of `sample` at temperature 0; bool [rows]: whether a row's logits are finite.

        logits: float32 [rows, vocab]; they must not be changed. A row is not finite if one of its
        logits is NaN or +inf, or if none is above -inf: its token is then 0. Later calls must not overwrite the
        results.
        """


class GraphKey(NamedTuple):
    """What distinguishes captured steps: of one key, all have the same shapes and do the same work.

    `kind` of the steps: "decode" has requests alone, each with `tokens` tokens. `rows`: of requests, padding included.
    `features`: what else the step does, such as keeping hidden states, in alphabetical order.
    """

    kind: str
    rows: int
    tokens: int = 1
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For messages: "decode steps of 4 rows, 1 token each"."""
        tokens = f"{self.tokens} token{'' if self.tokens == 1 else 's'} each"
        return ", ".join((f"{self.kind} steps of {self.rows} rows", tokens, *self.features))


class Graphs(Protocol):
    """Captured steps of one worker process.

    Core captures while the engine starts, most rows first, and replays on the thread that runs steps; both happen in
    torch's inference mode. Core keeps no result past the next replay, so all keys may share one memory pool.
    """

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `run` and return its output tensor, which every replay overwrites; before the first it is undefined.

        `run` may be called more than once. It reads and writes the same storages each time and never
        synchronizes: no copy to the host, no event. Memory that it allocates belongs to the graph from then on.
        """

    def replay(self, key: GraphKey, metadata: Sequence[Any]) -> None:
        """Enqueue the graph recorded under `key`, after applying the host lengths of this step's attention metadata.

        `metadata`: of each cache group, what its attention backend's `plan` has just returned for a batch with
        `graph=key.rows`. Where steps overlap, the previous replay of `key` may still be running.
        """


class Communicator(Protocol):
    """The collective operations of one group of ranks, as far as the platform's capabilities say (`COLLECTIVES`).

    All members call the same operations with tensors of the same dtype and, where nothing else is said, of the same
    shape, in the same order, on the thread that runs steps. Sums are of float32, float16, bfloat16, int32 and int64;
    what only moves values takes any dtype. A tensor that is replaced is contiguous, or ValueError is raised; others
    need not be. Tensors are on the device, and may have no elements.

    Operations may be called while a step is captured: a replay repeats them, with the same numbers of rows. Those of
    "send_recv", and `all_to_all_uneven`, are called in eager steps only. An operation that a member does not join
    raises `srv.errors.RankLost` with the name of the group, within `RankGroup.timeout_s`. The host does not wait,
    unless it computes the operation itself.
    """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by the sum over all members, and return it. Every member gets the same bits."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[members, *shape]: the tensors of all members, in the order of their ranks."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor: [members * n, *shape]. Returns [n, *shape]: of the sum over all members, the n rows of this member.

        ValueError if the rows cannot be divided among the members.
        """

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor: [members * n, *shape], n rows for each member, in the order of ranks. Returns the same shape: the n
        rows that each member has for this one.

        ValueError if the rows cannot be divided among the members.
        """

    def all_to_all_uneven(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """As `all_to_all`, with send[i] rows for member i, and receive[i] from it: [sum(receive), *shape].

        The numbers are on the host; `send` of each member and `receive` of the others agree. Members' tensors differ
        in the number of rows alone. ValueError if `tensor` does not have sum(send) rows.
        """

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Replace `tensor` by that of the member `source`, and return it."""

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send to the member `target`, which calls `recv`; no other member takes part.

        Two members pair these calls in their order. One that sends may wait until the other receives, so two that
        both send first may wait for one another.
        """

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Replace `tensor` by the one that the member `source` sends, of the same shape and dtype, and return it."""

    def barrier(self) -> None:
        """Wait until every member is here; for starting up, so at most `RankGroup.start_timeout_s`."""

    def abort(self) -> None:
        """Release connections and memory, so that a group of the same name can be joined.

        Operations that still wait, on this rank or another, fail when their timeout has passed, or before.
        """


@runtime_checkable
class Platform(Protocol):
    """A live platform in one worker process."""

    @property
    def name(self) -> str: ...

    def device(self, index: int) -> torch.device:
        """The torch device with this index on this host; that of this worker is `EngineContext.device_index`.

        Core computes the index of each rank. Raises PlatformUnavailable for one that this host does not have. A
        platform without devices of their own ("host_memory") returns the same for every index.
        """

    def init_worker(self, rank: int) -> None:
        """Prepare this process for computing: select the device, set thread counts, load libraries."""

    def memory(self, device: torch.device) -> Memory:
        """Free and total memory of the device now."""

    def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
        """What this process has allocated, as its allocator counts tensors; then, if asked, the peak starts from now.

        Used for the memory ledger if the platform declares the capability "memory_use"; one that never does needs no
        such member. It must not wait for the device. A platform that computes in host memory counts what is resident,
        and has no peak if its KV pool takes memory as it is written to.
        """

    def streams(self, device: torch.device) -> Streams:
        """The streams of this worker, after `init_worker`. `compute` is the one that work goes to outside `use`."""

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New host memory, from and to which copies with `non_blocking=True` run without the host: page-locked, where
        the device has such copies. Uninitialized. A platform that computes in host memory returns an ordinary tensor.
        """

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        """Allocate a pool of `pages` pages and page 0 (slots of a recurrent group, and slot 0).

        Zeroed where reading unwritten memory could give NaN. `srv.platform.pools.plain_pool` allocates plain tensors.
        Raises NotImplementedError for a cache spec that the platform does not lay out.
        """

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of whole pages, over all layers, in the current stream: `pages` are (from, to).

        The pools differ and have the same layout. Either may be in `staging` memory instead of on the device.
        """

    @property
    def ops(self) -> Sequence[OpImpl]:
        """Op implementations, best first. An op that no implementation supports is an error at start-up."""

    @property
    def graphs(self) -> Graphs | None:
        """Captured steps, or None if the platform captures none."""

    def communicator(self, group: RankGroup) -> Communicator:
        """Join a group of several ranks; returns when all members have joined.

        Called once per group, after `init_worker`, if the platform declares the capability "communicator". A
        platform that never declares it needs no such member (`srv.platform.contract.OPTIONAL`). A rank may be in
        several groups at a time, with other ranks in each; groups with the same members have communicators of their
        own. All members join their groups in the same order.
        """

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """A range that the profiler of the device's vendor shows, around what the host enqueues within the context.

        Ranges nest. Used for `--enable-layer-markers` if the platform declares the capability "profiler_ranges"; one
        that never does needs no such member. The ranges of torch.profiler are core's.
        """

    def graph_piece(self) -> AbstractContextManager[Callable[[], None]]:
        """Record what this thread enqueues within the context; the value, a function, enqueues it again.

        Used for `--enable-piecewise-graphs` if the platform declares the capability "piecewise_graphs"; one that never
        does needs no such member. Pieces are captured one after the other, before `Graphs.capture` is called, in
        torch's inference mode, and have the restrictions of what `Graphs` captures. Results of one may be read by a
        later one of the same forward pass, and work that is not captured runs between two replays. Core replays the
        pieces of a pass in order, and keeps no results past the next pass or the next `Graphs.replay`, except in
        tensors that existed before: pieces and graphs may share one memory pool. No context is empty.
        """

    def post_load(self, model: torch.nn.Module) -> None:
        """Called when weights are loaded and on the device: repack them, cast formats, free what is not needed."""

    def diagnose(self) -> list[Check]:
        """Check this machine for `srv doctor`: driver, toolkit, a small real computation."""
