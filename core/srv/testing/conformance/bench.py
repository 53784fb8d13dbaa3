"""A test bench for one attention backend: sequences in a real pool, every step compared with float64 on the host.

The backend writes all keys and values itself, step by step, as in the engine. The expected ones are kept separately, so
that a key written to the wrong place is found when it is read; what the pool holds then tells whether writing or
reading is at fault. Of a backend that is known to write wrongly, the bench stores the keys and values itself before
each layer, and where the step replaces them by others, those may be read. Pages are allocated in shuffled order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, AttentionLayer
from srv.platform.pools import is_float8
from srv.testing.conformance import stored
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import AttentionSetup, allocate_pool, build_attention, dtype_of

PAGES = 96
SPARE_PAGES = 16  # beside a long row, for others and for output
_COMMON_QUERY = 32.0
OUTLIER = 9.0  # in pools with scales: beyond what they hold
# |got - want| <= first + second * |want|; allows a softmax in the dtype itself, and TF32 products for float32.
TOLERANCES = {"float32": (2e-3, 2e-3), "bfloat16": (3e-2, 2e-2), "float16": (8e-3, 4e-3)}


@dataclass
class BenchRow:
    """One row: its pages in order, and its keys and values by layer, float64 [tokens, heads, dim]."""

    pages: list[int] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0


class Bench:
    """`backend` computes all steps of the setup; `own` is the one under test, which may compute some rows only.

    `traits`: fields of `AttentionLayer`, of all layers. `extra_columns`: those of the page table past the longest row.
    `pages`: of the pool. `fused`: q, k and v are views of one wide tensor, as a fused projection returns them.
    `common`: added to all products q.k, before they are scaled.
    """

    def __init__(
        self,
        kit: Kit,
        setup: AttentionSetup,
        *,
        extra_columns: int = 0,
        pages: int = PAGES,
        fused: bool = False,
        seed: int = 0,
        common: int = 0,
        **traits: Any,
    ) -> None:
        if traits.get("bidirectional"):
            setup = setup.with_layers(0)  # of an encoder, no layer has a place in the pool
        self.kit, self.setup = kit, setup
        self.page_size = setup.layout.page_size
        self.kv = allocate_pool(kit, setup.layout, pages)
        self.backend, self.own = build_attention(kit, setup, self.kv)
        self._plain = stored.is_plain(setup.layout)
        self._stores = self._plain and setup.name in kit.wrong_writers
        self._spoiled: set[int] = set()
        self._generator = torch.Generator().manual_seed(seed)
        # Page 1 is allocated first, so that a write just past page 0 damages a row.
        self._free = [*(torch.randperm(pages - 1, generator=self._generator) + 2).tolist(), 1]
        self._extra_columns, self._fused, self._common = extra_columns, fused, common
        shape, count = setup.shape, len(setup.layout.group.layers) or 1
        traits = {"scale": shape.head_dim**-0.5, **traits}
        first = AttentionLayer(0, shape.heads, shape.kv_heads, shape.head_dim, **traits)
        self.layers = tuple(dataclasses.replace(first, index=index) for index in range(count))

    def sequence(self, shared: BenchRow | None = None, tokens: int = 0) -> BenchRow:
        """A new row; with `shared`, it begins with the first `tokens` (whole pages) of that row."""
        if shared is None:
            return BenchRow()
        assert tokens % self.page_size == 0
        return BenchRow(
            shared.pages[: tokens // self.page_size],
            {layer: keys[:tokens] for layer, keys in shared.keys.items()},
            {layer: values[:tokens] for layer, values in shared.values.items()},
            tokens,
        )

    def spoiled_page(self) -> int:
        """A page whose keys and values are NaN in the first layer, written by the backend or as in `expect`."""
        row, count = self.sequence(), self.page_size
        q, k, v = self.inputs(count)
        k, v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        batch = self.batch([(row, count)])
        if self._stores:
            stored.write(self.kv, 0, self._slots(row, count), k, v)
        else:
            self.forward(self.layers[0], q, k, v, self.backend.plan(batch))
        self._spoiled.add(row.pages[0])
        return row.pages[0]

    def step(
        self, rows: Sequence[tuple[BenchRow, int]], what: str, layers: Sequence[int] = (0,), ahead: int = 0
    ) -> None:
        """Compute the given number of tokens per row in one step, and compare. Fault, naming `what`, if it is wrong.

        ahead: so many tokens more than its own a row has at most, as the host knows; the device knows its length.
        """
        step_groups([(self, rows)], what, layers, ahead)

    def step_of_single_tokens(self, row: BenchRow, order: Sequence[int], what: str) -> None:
        """Compute len(order) tokens of one row in one step, each as a row of its own over the same pages.

        order: which of the tokens each row of the step has.
        """
        whole = self.batch([(row, len(order))])
        lengths = [row.length + token + 1 for token in order]
        batch = AttentionBatch([1] * len(order), lengths, whole.page_table.repeat(len(order), 1))
        q, k, v = self.inputs(len(order))
        chosen, rows = torch.tensor(order), [(row, len(order))]
        metadata = self.backend.plan(batch)
        self.expect(rows, 0, k, v)
        out = self.forward(self.layers[0], q[chosen], k[chosen], v[chosen], metadata)
        self.compare(rows, 0, q, out[chosen.argsort()], what, queries=1)
        row.length += len(order)

    def batch(self, rows: Sequence[tuple[BenchRow, int]], graph: int | None = None, columns: int = 0) -> AttentionBatch:
        """Allocate pages for the new tokens, and return the step as a backend gets it."""
        for row, count in rows:
            while len(row.pages) * self.page_size < row.length + count:
                row.pages.append(self._free.pop())
        width = max(columns, max(len(row.pages) for row, _ in rows) + self._extra_columns)
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
        """Random q, k, v on the host, in the setup's dtype. Queries are large, so that a missing token shows."""
        shape, dtype = self.setup.shape, dtype_of(self.setup.dtype)

        def random(heads: int, scale: float) -> Tensor:
            return (torch.randn(tokens, heads, shape.head_dim, generator=self._generator) * scale).to(dtype)

        q, k, v = random(shape.heads, 2.0), random(shape.kv_heads, 1.0), random(shape.kv_heads, 1.0)
        if self._common:  # powers of two, whose product no dtype rounds
            q[..., 0], k[..., 0] = _COMMON_QUERY, self._common / _COMMON_QUERY
        if self.setup.layout.dtype == "int8":
            return q, avoid_ties(k), avoid_ties(v)
        return (q, with_outlier(k), with_outlier(v)) if self.setup.layout.scales else (q, k, v)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        """The backend's result, on the host. Fault unless it is a tensor like q on the device."""
        moved_q, moved_k, moved_v = on_device((q, k, v), self.kit.device, fused=self._fused)
        out: object = self.backend.forward(layer, moved_q, moved_k, moved_v, metadata)
        return self.check_result(out, q).to("cpu")

    def check_result(self, out: object, q: Tensor) -> Tensor:
        """The result. Fault unless it is a tensor like q on the device."""
        device = self.kit.device
        if not isinstance(out, Tensor):
            raise Fault(f"{self.setup}: forward returned a {type(out).__name__}, not a tensor")
        if not same_device(out.device, device):
            raise Fault(
                f"{self.setup}: forward returned its result on {out.device}, but the platform's device is {device}"
            )
        if out.dtype != q.dtype or out.shape != q.shape:
            raise Fault(
                f"{self.setup}: forward returned {out.dtype} {tuple(out.shape)}, not {q.dtype} {tuple(q.shape)}"
            )
        return out

    def expect(self, rows: Sequence[tuple[BenchRow, int]], index: int, k: Tensor, v: Tensor) -> None:
        """Append the keys and values of a step's new tokens to the rows, before the step; if need be, store them."""
        k, v = self._rounded(index, k.double(), v.double())
        end = 0
        for row, count in rows:
            new = slice(end, end := end + count)
            row.keys[index] = torch.cat((row.keys.get(index, k[:0]), k[new]))
            row.values[index] = torch.cat((row.values.get(index, v[:0]), v[new]))
        for row, _ in rows if self._stores else ():
            self._store(row, index)

    def _rounded(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as a pool of this dtype returns them."""
        if self.setup.layout.dtype == "int8":
            return round_trip_int8(k), round_trip_int8(v)
        if is_float8(self.setup.layout.dtype):
            dtype, scales = dtype_of(self.setup.layout.dtype), self.kv.scales(index)
            return round_trip_float8(k, dtype, scales.key), round_trip_float8(v, dtype, scales.value)
        return k, v

    def _slots(self, row: BenchRow, tokens: int) -> Tensor:
        return stored.slots(row.pages, self.page_size, tokens)

    def _owned(self, row: BenchRow, tokens: int) -> Tensor:
        """bool [tokens]: which of a row's tokens are not in a spoiled page."""
        owned = torch.tensor([page not in self._spoiled for page in row.pages])
        return owned.repeat_interleave(self.page_size)[:tokens]

    def _store(self, row: BenchRow, index: int) -> None:
        tokens = len(row.keys[index])
        owned = self._owned(row, tokens)
        slots = self._slots(row, tokens)[owned]
        stored.write(self.kv, index, slots, row.keys[index][owned], row.values[index][owned])

    def compare(
        self,
        rows: Sequence[tuple[BenchRow, int]],
        index: int,
        q: Tensor,
        actual: Tensor,
        what: str,
        queries: int = 0,
    ) -> None:
        """Compare the result of a step with the reference. Fault, with whether writing or reading is wrong.

        queries: of each row in the step, if they are not those of `rows`.
        """
        ends = list(itertools.accumulate(count for _, count in rows))
        for number, ((row, count), end) in enumerate(zip(rows, ends, strict=True)):
            tokens = slice(end - count, end)
            fault = self._fault(row, index, q[tokens].double(), actual[tokens])
            if fault:
                length = len(row.keys[index])
                backend = self.setup.computing(queries or count)
                raise Fault(f"{what}: {backend}: row {number}, {count} queries over {length} tokens: {fault}")

    def _fault(self, row: BenchRow, index: int, q: Tensor, actual: Tensor) -> str:
        """What is wrong with the result of one row, as a clause; empty if nothing is."""
        expected = row.keys[index], row.values[index]
        fault = difference(actual, reference(self.layers[index], q, *expected), self.setup.dtype)
        if not fault or not self._plain:
            return fault
        owned = self._owned(row, len(expected[0]))[:, None, None]
        keys, values = stored.read(self.kv, index, self._slots(row, len(expected[0])))
        unwritten = torch.where(owned, keys, expected[0]), torch.where(owned, values, expected[1])
        if not any(difference(part, old, self.setup.dtype) for part, old in zip(unwritten, expected, strict=True)):
            return f"{fault}. The pool holds the keys and values of all these tokens: reading them is at fault"
        if difference(actual, reference(self.layers[index], q, *unwritten), self.setup.dtype):
            return f"{fault}. The pool holds other keys or values of these tokens, and the result is not theirs either"
        if self._stores:
            return ""
        return f"{fault}. That is the result for what the pool holds: writing keys and values is at fault"


def step_groups(
    groups: Sequence[tuple[Bench, Sequence[tuple[BenchRow, int]]]],
    what: str,
    layers: Sequence[int] = (0, 1),
    ahead: int = 0,
) -> None:
    """`Bench.step` for several cache groups, as in an engine: all plan a step, then their layers follow one another."""
    batches = [known_on_device(bench.batch(rows), ahead) for bench, rows in groups]
    planned = [(bench, rows, bench.backend.plan(one)) for (bench, rows), one in zip(groups, batches, strict=True)]
    for index in layers:
        for bench, rows, metadata in planned:
            q, k, v = bench.inputs(sum(count for _, count in rows))
            bench.expect(rows, index, k, v)
            out = bench.forward(bench.layers[index], q, k, v, metadata)
            bench.compare(rows, index, q, out, what)
    for _, rows, _ in planned:
        for row, count in rows:
            row.length += count


def on_device(parts: Sequence[Tensor], device: torch.device, *, fused: bool) -> list[Tensor]:
    """[rows, heads, dim] each, copied to the device; fused: as views of one tensor [rows, all heads * dim]."""
    if not fused:
        return [part.to(device) for part in parts]
    wide = torch.cat([part.flatten(1) for part in parts], 1).to(device)
    views = wide.split_with_sizes([part[0].numel() for part in parts], 1)
    return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]


def pages_for(setup: AttentionSetup, tokens: int) -> int:
    """The pages of a pool with room for a row of so many tokens, beside short ones."""
    return max(PAGES, -(-tokens // setup.layout.page_size) + SPARE_PAGES)


def known_on_device(batch: AttentionBatch, ahead: int) -> AttentionBatch:
    """The step with its lengths on the device, and bounds that are `ahead` tokens higher; unchanged if it is 0."""
    if not ahead:
        return batch
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32).to(batch.page_table.device)
    return dataclasses.replace(batch, kv_lens=[length + ahead for length in batch.kv_lens], lengths=lengths)


def reference(layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last len(q) tokens of a row to all its tokens, in float64; causal, unless it is bidirectional.

    q: [queries, heads, dim]; keys, values: [tokens, kv_heads, dim]. Query heads h*n .. h*n+n-1 share KV head h.
    """
    group = layer.heads // layer.kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.temperature_from is not None:
        positions = torch.arange(len(keys) - len(q), len(keys), dtype=torch.float64).clamp(min=layer.temperature_from)
        scores *= (positions.log() / math.log(layer.temperature_from))[:, None]
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None, :]
    if layer.alibi is not None:
        scores -= torch.tensor(layer.alibi, dtype=torch.float64)[:, None, None] * distance
    if layer.bias_values is not None:
        biases = torch.tensor(layer.bias_values, dtype=torch.float64)
        most = biases.shape[1] // 2
        scores += biases[:, (-distance).clamp(-most, most) + most]
    if layer.bidirectional:
        distance = distance.abs()
    masked = distance < 0
    if layer.window is not None:
        masked |= distance >= layer.window
    if layer.chunk is not None:
        chunks = torch.arange(len(keys) - len(q), len(keys))[:, None] // layer.chunk
        masked |= torch.arange(len(keys))[None, :] // layer.chunk != chunks
    scores = scores.masked_fill(masked, float("-inf"))
    if layer.sink_scores is not None:
        sinks = torch.tensor(layer.sink_scores, dtype=torch.float64)[:, None, None]
        scores = torch.cat((scores, sinks.expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)


def avoid_ties(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], changed so that it quantizes to the same int8 values in every dtype.

    The largest magnitude per token and head becomes 127 times a power of two, the scale; the others become multiples
    of the scale, plus or minus a quarter of it, or none, for multiples up to 31.
    """
    scale = torch.exp2((x.double().abs().amax(-1, keepdim=True) / 127).log2().ceil())
    count = x.double() / scale
    whole = count.round()
    quarters = ((count - whole) * 2).round() / 4
    moved = whole + torch.where(whole.abs() < 32, quarters, 0.0)
    largest = whole.abs().argmax(-1, keepdim=True)
    moved.scatter_(-1, largest, whole.gather(-1, largest).sign() * 127)
    return (moved * scale).to(x.dtype)


def with_outlier(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with `OUTLIER`, of either sign, as one element of each vector."""
    changed, token = x.clone(), torch.arange(len(x))
    changed[token, :, token % x.shape[2]] = OUTLIER * (1 - 2 * (token % 2)[:, None]).to(x.dtype)
    return changed


def round_trip_int8(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] quantized to int8 as `KVLayout` defines it, and dequantized."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, 0.0, (x / scale).round() * scale)


def round_trip_float8(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """float64 x divided by a scale, limited and rounded to 8-bit floats as `KVLayout` defines it, and multiplied."""
    limits = torch.finfo(dtype)
    limited = (x / scale).clamp(-limits.max, limits.max)
    exponent = (limited.frexp().exponent - 1).clamp_min(int(math.log2(limits.tiny)))
    step = torch.ldexp(torch.full_like(limited, limits.eps), exponent)
    return (limited / step).round() * step * scale


def difference(actual: Tensor, want: Tensor, dtype: str) -> str:
    """The largest error of a result, as a clause; empty if all are within the tolerance."""
    absolute, relative = TOLERANCES[dtype]
    error = (actual.double() - want).abs()
    excess = (error - absolute - relative * want.abs()).nan_to_num(torch.inf)
    if bool((excess <= 0).all()):
        return ""
    worst = int(excess.argmax())
    return f"{actual.flatten()[worst].item():.4g} where {want.flatten()[worst].item():.4g} is expected"
