"""L2: backends of multi-head latent attention, compared with float64 on the host.

A backend is built as a worker builds it, over pools that fit a small model with latent attention, and gets prompts,
chunks after a cached prefix and single tokens, in one step and in any order; prompts and chunks are short and long.
Pages that no row has hold NaN.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from srv.errors import Refusal
from srv.models.base import torch_dtype
from srv.planning.pools import kv_dtype
from srv.platform.contract import check_latent, why_unsupported
from srv.platform.facts import BackendSpec
from srv.platform.interface import AttentionBackend, AttentionBatch, BackendContext, GraphKey, Graphs, KVBuffers
from srv.platform.latent import LatentAttentionBackend
from srv.specs import AttentionLayer, IndexDims, KVLayout, Latent, LatentDims, ModelFacts
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.setups import (
    PAGE_SIZES,
    allocate_pool,
    backend_specs,
    declared_dtypes,
    is_native,
    resolve_for,
)
from srv.testing.conformance.values import user_statement

SIZES = (LatentDims(64, 32, 16, 32), LatentDims(512, 128, 64, 128))
HEADS = (4, 20)  # the second number is not a power of two
INDEXER = IndexDims(6, 32, 7)  # rows have more keys than it chooses
TOLERANCES = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}  # of the largest expected result
LONG = 171  # queries for which the keys and values of each head take fewer products than absorbing, for both sizes
_LONG_ROW = 560  # tokens, of captured steps
TOKENS = 1024  # that the pool has room for, at least
_LAYERS = 2
_ROWS = 4  # of captured steps
_NO_INDEXER = IndexDims(0, 0, 0, own=False)


def latent(kit: Kit) -> str:
    """Every backend that names a class for latent attention, in each declared dtype."""
    specs = [spec for spec in backend_specs(kit, "attention") if spec.latent]
    if not specs:
        raise NotApplicable("no attention backend computes latent attention")
    summaries: list[str] = []
    refused: list[str] = []
    for spec in specs:
        for dtype in declared_dtypes(kit):
            fitting = list(_fitting(kit, spec, dtype, refused))
            for layer, layout in fitting:
                _Run(kit, spec, layer, layout, dtype).check()
            if fitting:
                summaries.append(
                    f"{spec.name}, {dtype}, pages of {' and '.join(str(fit.page_size) for _, fit in fitting)}"
                )
    if not summaries:
        raise NotApplicable(f"no attention backend fits such a model here: {'; '.join(dict.fromkeys(refused))}")
    return "; ".join(summaries)


def captured(kit: Kit) -> str:
    """The same for captured steps, of backends that declare them, in the first dtype that fits."""
    graphs = kit.platform.graphs
    specs = [spec for spec in backend_specs(kit, "attention") if spec.latent and spec.graphs]
    if graphs is None or not specs:
        raise NotApplicable("no attention backend computes latent attention in captured steps")
    summaries: list[str] = []
    refused: list[str] = []
    for spec in specs:
        for dtype in declared_dtypes(kit):
            fitting = [fit for fit in _fitting(kit, spec, dtype, refused) if fit[0].indexer is None]
            for layer, layout in fitting:
                _Run(kit, spec, layer, layout, dtype).check_captured(graphs)
            if fitting:
                summaries.append(
                    f"{spec.name}, {dtype}, pages of {' and '.join(str(fit.page_size) for _, fit in fitting)}"
                )
                break
    if not summaries:
        raise NotApplicable(f"no attention backend fits such a model here: {'; '.join(dict.fromkeys(refused))}")
    return "; ".join(summaries)


def _fitting(kit: Kit, spec: BackendSpec, dtype: str, refused: list[str]) -> Iterator[tuple[AttentionLayer, KVLayout]]:
    """A layer and a layout for each of the small sizes, in the first pages that the backend accepts.

    If its spec has the trait, also such a layer with an indexer.
    """
    for heads, dims in zip(HEADS, SIZES, strict=True):
        model = _model(dtype, heads, dims)
        for page_size in (*PAGE_SIZES, None):
            statements = [user_statement("attention_backend", spec.name), user_statement("dtype", dtype)]
            statements += [user_statement("page_size", page_size)] if page_size is not None else []
            try:
                config = resolve_for(kit, model, *statements).config
            except Refusal as refusal:
                refused += [f"{spec.name}: {rejection.reason}" for rejection in refusal.rejections]
                continue
            layer = AttentionLayer(1, heads, 1, dims.key_dim + dims.rope_dim, 0.11, latent=dims)
            group = Latent(tuple(range(_LAYERS)), dims.latent_dim, dims.rope_dim)
            layout = KVLayout(group, config.memory.page_size, kv_dtype(config), spec.kv_order)
            yield layer, layout
            if "indexer" in spec.traits:
                indexed = msgspec.structs.replace(group, index_dim=INDEXER.dim, indexed=group.layers)
                yield dataclasses.replace(layer, indexer=INDEXER), dataclasses.replace(layout, group=indexed)
            break


def _model(dtype: str, heads: int, dims: LatentDims) -> ModelFacts:
    """The facts of a small DeepSeek-V2 without experts."""
    base = small_model(dtype)
    config = {
        **{name: value for name, value in base.config.items() if name not in ("head_dim", "architectures")},
        **{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None},
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "first_k_dense_replace": base.layers},
        **{"kv_lora_rank": dims.latent_dim, "qk_nope_head_dim": dims.key_dim},
        **{"qk_rope_head_dim": dims.rope_dim, "v_head_dim": dims.value_dim},
    }
    groups = (Latent(tuple(range(base.layers)), dims.latent_dim, dims.rope_dim),)
    return dataclasses.replace(
        base,
        architecture="DeepseekV2ForCausalLM",
        config=config,
        heads=heads,
        kv_heads=1,
        head_dim=dims.key_dim + dims.rope_dim,
        cache_groups=groups,
    )


class _Step(NamedTuple):
    """One step on the host. operands: q, k and v; expected: float64, the results of all rows."""

    queries: list[int]
    ends: list[int]
    table: Tensor
    operands: tuple[Tensor, Tensor, Tensor]
    expected: Tensor


class _Run:
    """Sequences over the pool of one backend. The vectors of each are kept, to compare with."""

    def __init__(self, kit: Kit, spec: BackendSpec, layer: AttentionLayer, layout: KVLayout, dtype: str) -> None:
        self._kit, self._layer, self._dtype, self._name = kit, layer, torch_dtype(dtype), dtype
        self._size = layout.page_size
        indexer = "" if layer.indexer is None else f", {layer.indexer}"
        self._what = f"{spec.name}, {dtype}, {layer.heads} heads, {layer.latent}{indexer}, pages of {layout.page_size}"
        pages = max(64, TOKENS // layout.page_size)
        pool = allocate_pool(kit, layout, pages)
        _fill(pool)
        context = BackendContext(kit.platform, kit.device, pool, 8, kit.transfers, {})
        self._backend: LatentAttentionBackend = check_latent(pkgutil.resolve_name(spec.latent)(context), spec.latent)
        if (reason := why_unsupported(self._backend, layer, spec.name)) is not None:
            raise Fault(f"{self._what}: its spec accepts such a layer, but the backend refuses it: {reason}")
        self._random = torch.Generator().manual_seed(11)
        self._free = random.Random(3).sample(range(1, pages + 1), pages)
        self._pages: dict[str, list[int]] = {}
        self._seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        dims = layer.latent
        assert dims is not None
        self._dims = dims
        self._index = layer.indexer or _NO_INDEXER
        self._up = self._draw(layer.heads, dims.key_dim + dims.value_dim, dims.latent_dim, gain=dims.latent_dim**-0.5)
        up = torch.ones_like(self._up, device=kit.device)
        self._backend.prepare(layer, up)
        up.copy_(self._up)  # weights are updated in place, and prepared again
        self._backend.prepare(layer, up)

    def check(self) -> None:
        size = min(self._size, 16)
        self._step("prompts", ("a", 2 * size + 3), ("b", 1), ("c", size))
        self._step("output and a chunk after a cached prefix", ("b", 1), ("a", size + 1), ("c", 1))
        self._step("prompts and output in any order", ("c", 3), ("d", size + 2), ("a", 1), ("b", 1))
        self._step("output", ("d", 1), ("c", 1), ("b", 1), ("a", 1))
        self._step("a long prompt beside output", ("a", 1), ("e", LONG), ("b", 1))
        self._step("a long chunk after a cached prefix, and a short one", ("e", LONG + 1), ("d", size))

    def _draw(self, *shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._random) * gain).to(self._dtype)

    def check_captured(self, graphs: Graphs) -> None:
        """Prompts, then output by replays of a step of `_ROWS` rows, of which those without a sequence are padding."""
        size, dims, layer = min(self._size, 16), self._dims, self._layer
        shapes = (layer.heads, dims.key_dim + dims.rope_dim), (1, dims.latent_dim), (1, dims.rope_dim)
        zeros = [torch.zeros(_ROWS, *shape, dtype=self._dtype, device=self._kit.device) for shape in shapes]
        longest = _LONG_ROW if is_native(self._kit) else 2 * size + 3
        step = _Captured(self._kit, graphs, self._backend, layer, zeros, columns=2 + longest // self._size)
        self._step("prompts", ("a", longest), ("b", 1), ("c", size))
        for names in (("a", "b", "c"), ("c", "a", "b"), ("b",), ("d", "b", "c", "a")):
            rows = self._next(*((name, 1) for name in names))
            self._compare(f"replay of {_ROWS} rows with {len(names)} sequences", rows, step.replay(rows))

    def _step(self, what: str, *rows: tuple[str, int]) -> None:
        step, place = self._next(*rows), self._kit.device
        with torch.inference_mode():
            plan = self._backend.plan(AttentionBatch(step.queries, step.ends, step.table.to(place)))
            q, k, v = (operand.to(place) for operand in step.operands)
            actual = self._backend.forward(self._layer, q, k, v, plan).cpu()
        self._compare(what, step, actual)

    def _next(self, *rows: tuple[str, int]) -> _Step:
        """New tokens of each row, pages for them, and the result that is expected."""
        dims, total = self._dims, sum(count for _, count in rows)
        q = self._draw(total, self._layer.heads, dims.key_dim + dims.rope_dim)
        latents, ropes = self._draw(total, 1, dims.latent_dim), self._draw(total, 1, dims.rope_dim)
        joined = self._draw(total, 1, sum(self._index.operands))
        index_keys, queries, weights = joined[:, 0].split_with_sizes(list(self._index.operands), 1)
        expected: list[Tensor] = []
        ends: list[int] = []
        begin = 0
        for name, count in rows:
            tokens = slice(begin, begin + count)
            step = latents[tokens, 0], ropes[tokens, 0], index_keys[tokens]
            old = self._seen.get(name, tuple(operand[:0] for operand in step))
            latent, rope, index = (torch.cat(pair) for pair in zip(old, step, strict=True))
            self._seen[name] = latent, rope, index
            pages = self._pages.setdefault(name, [])
            while len(pages) * self._size < len(latent):
                pages.append(self._free.pop())
            chosen = _chosen(self._index, queries[tokens], weights[tokens], index)
            expected.append(_dense(self._layer, dims, q[tokens], latent, rope, self._up, chosen))
            ends.append(len(latent))
            begin += count
        width = max(len(self._pages[name]) for name, _ in rows)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for number, (name, _) in enumerate(rows):
            table[number, : len(self._pages[name])] = torch.tensor(self._pages[name], dtype=torch.int32)
        operands = q, torch.cat((latents, joined), -1), ropes
        return _Step([count for _, count in rows], ends, table, operands, torch.cat(expected))

    def _compare(self, what: str, step: _Step, actual: Tensor) -> None:
        expected = step.expected
        if actual.dtype != self._dtype or actual.shape != expected.shape:
            raise Fault(
                f"{self._what}: forward returned {actual.dtype} {tuple(actual.shape)}, "
                f"not {self._dtype} {tuple(expected.shape)}"
            )
        error = float((actual.double() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCES[self._name]:
            raise Fault(f"{self._what}: {what}: the largest relative error is {error:.2g}")


class _Captured:
    """A captured step of `_ROWS` rows with one token each, and its static buffers. operands: q, k and v."""

    def __init__(
        self,
        kit: Kit,
        graphs: Graphs,
        backend: AttentionBackend,
        layer: AttentionLayer,
        operands: Sequence[Tensor],
        columns: int,
    ) -> None:
        self._kit, self._graphs, self._backend, self._operands = kit, graphs, backend, operands
        self._table = torch.zeros(_ROWS, columns, dtype=torch.int32, device=kit.device)
        with torch.inference_mode():
            metadata, (q, k, v) = self._plan([1] * _ROWS), operands
            self._result = graphs.capture(GraphKey("decode", _ROWS), lambda: backend.forward(layer, q, k, v, metadata))

    def _plan(self, ends: list[int]) -> Any:
        return self._backend.plan(AttentionBatch([1] * _ROWS, ends, self._table, graph=_ROWS))

    def replay(self, step: _Step) -> Tensor:
        """The results of its rows, on the host; further rows are padding."""
        count = len(step.ends)
        with torch.inference_mode():
            for static, part in zip((self._table, *self._operands), (step.table, *step.operands), strict=True):
                static.zero_()
                static[:count, : part.shape[1]].copy_(part.to(self._kit.device))
            self._graphs.replay(GraphKey("decode", _ROWS), [self._plan([*step.ends, *([1] * (_ROWS - count))])])
            self._kit.synchronize()
            return self._result[:count].cpu()


def _fill(pool: KVBuffers) -> None:
    for tensor in pool.all():
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))


def _chosen(index: IndexDims, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """bool [Q, K]: the keys that each of the last Q tokens of a sequence attends to; without an indexer, all before it.

    queries: [Q, H * D]. weights: [Q, H]. keys: [K, D].
    """
    count, total = len(queries), len(keys)
    visible = torch.arange(total) <= torch.arange(total - count, total)[:, None]
    if not index.heads:
        return visible
    products = torch.einsum("qhd,kd->qhk", queries.view(count, index.heads, -1).double(), keys.double())
    scores = torch.einsum("qhk,qh->qk", (products * index.dim**-0.5).relu(), weights.double() * index.heads**-0.5)
    scores = scores.masked_fill(~visible, float("-inf"))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : index.top_k]
    return visible & torch.zeros_like(visible).scatter(1, best, True)


def _dense(
    layer: AttentionLayer, dims: LatentDims, q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, chosen: Tensor
) -> Tensor:
    """The last Q tokens of a sequence: q [Q, heads, D], latents [K, L], ropes [K, R] -> float64 [Q, heads, V]."""
    heads = torch.einsum("kl,hnl->khn", latents.double(), up.double())
    keys, values = heads[..., : dims.key_dim], heads[..., dims.key_dim :]
    keys = torch.cat((keys, ropes.double()[:, None].expand(-1, layer.heads, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(~chosen, float("-inf")).softmax(-1), values)
