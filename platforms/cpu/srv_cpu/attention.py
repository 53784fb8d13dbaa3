"""Attention on the host with torch operators, over the paged KV pool.

Owns reading and writing the pool's buffers. Everything that depends only on lengths and pages is computed once per
step (`srv_cpu.step_plan`); a layer then writes, gathers and attends in about six torch operators per group.

    rows with one query        sorted by length, divided into groups of similar length, padded to the longest:
                               q [rows, kv_heads, group, dim] x K [rows, kv_heads, longest, dim], one call
    rows with more queries     one row at a time, in blocks of queries, each with the keys that are visible to it:
                               q [kv_heads, group, block, dim] x K [kv_heads, 1 (expanded), visible, dim]
    rows of bidirectional      the same, with the keys of the step itself
    layers

Query heads that share a KV head are stacked in the query axis, or use an expanded key, so that K and V are not copied
(torch's `enable_gqa` copies them: four to six times slower in bfloat16).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.both_ways import attend_both_ways, unsupported
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.platform.pools import is_float8, round_to_float8
from srv_cpu.host import threads
from srv_cpu.packed import TORCH_TRAITS
from srv_cpu.reach import Reach
from srv_cpu.step_plan import Block, DecodeGroup, ExtendRow, PoolSlots, StepPlan, StepPlanner


class TorchNativeAttention:
    """The "torch_native" attention backend of the CPU platform. Any page size, head size and float dtype.

    Pools of 8-bit floats are gathered as bytes, and read as `self._dtype`.
    """

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend torch_native was built without a KV pool; it needs one")
        self._dtype: torch.dtype = getattr(torch, context.kv.layout.dtype)
        self._float8 = is_float8(context.kv.layout.dtype)
        self._stored = torch.uint8 if self._float8 else self._dtype
        self._scales = tuple(context.kv.scales(index) for index in range(len(context.kv.keys)))
        self._planner = StepPlanner(context.kv.layout.page_size, torch.float32 if self._float8 else self._dtype)
        self._keys = tuple(buffer.flatten(0, 1).view(self._stored) for buffer in context.kv.keys)  # [slots, heads, dim]
        self._values = tuple(buffer.flatten(0, 1).view(self._stored) for buffer in context.kv.values)
        self._key_workspace = _Workspace(self._stored)
        self._value_workspace = _Workspace(self._stored)
        torch.set_num_threads(threads())  # with native linear layers torch has one thread: see `post_load`

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return missing_traits(TORCH_TRAITS, layer) or unsupported(layer)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """See `srv.platform.interface.AttentionBackend`."""
        return self._planner.plan(batch, writes=bool(self._keys))

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: StepPlan) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        if layer.bidirectional:
            rows = metadata.rows
            return attend_both_ways(layer, q, k, v, rows.begins, rows.kv_lens)
        if not self._float8:
            return self._attend_stored(layer, q, k, v, metadata)
        key_scale, value_scale = self._scales[layer.index]
        k, v = round_to_float8(k, self._dtype, key_scale), round_to_float8(v, self._dtype, value_scale)
        return self._attend_stored(replace(layer, scale=layer.scale * key_scale), q, k, v, metadata).mul_(value_scale)

    def _attend_stored(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: StepPlan) -> Tensor:
        """Write k and v, and attend to what is then stored."""
        read_plan = self._planner.read_plan(metadata, Reach(layer.window, layer.chunk))
        sinks = _sinks(layer)
        keys, values = self._keys[layer.index], self._values[layer.index]
        keys.index_copy_(0, metadata.written, k.to(self._dtype).view(self._stored))
        values.index_copy_(0, metadata.written, v.to(self._dtype).view(self._stored))
        if not read_plan.extend and len(read_plan.decode) == 1 and read_plan.decode[0].tokens is None:
            return self._decode(layer, q, keys, values, read_plan.decode[0], sinks)
        out = q.new_empty(q.shape[0], layer.heads, v.shape[-1])
        for group in read_plan.decode:
            assert group.tokens is not None
            attended = self._decode(layer, q.index_select(0, group.tokens), keys, values, group, sinks)
            out.index_copy_(0, group.tokens, attended)
        for row in read_plan.extend:
            self._extend(layer, q, k, v, keys, values, row, sinks, out)
        return out

    def _decode(
        self,
        layer: AttentionLayer,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        group: DecodeGroup,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [rows, heads, dim] -> [rows, heads, value_dim]."""
        shape = (group.rows, group.longest, layer.kv_heads, -1)
        key = self._key_workspace.read(keys, group.slots).view(self._dtype).view(shape).transpose(1, 2)
        value = self._value_workspace.read(values, group.slots).view(self._dtype).view(shape).transpose(1, 2)
        query = q.view(group.rows, layer.kv_heads, -1, q.shape[2])
        changes = _alibi(layer, group), _temperature(layer, group)
        out = _attend(layer, query, key, value, group.mask, False, *changes, sinks)
        return out.reshape(group.rows, layer.heads, -1)

    def _extend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        row: ExtendRow,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        if row.slots is None:
            key, value = k[row.begin : row.end], v[row.begin : row.end]
        else:
            key = self._key_workspace.read(keys, row.slots).view(self._dtype)
            value = self._value_workspace.read(values, row.slots).view(self._dtype)
        group = layer.heads // layer.kv_heads
        sinks = None if sinks is None else sinks.unsqueeze(-1)
        key = key.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        value = value.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        for block in row.blocks:
            tokens = slice(row.begin + block.begin, row.begin + block.end)
            query = q[tokens].view(block.end - block.begin, layer.kv_heads, group, -1).permute(1, 2, 0, 3)
            visible = slice(block.first, block.last)
            read = key[:, :, visible], value[:, :, visible]
            changes = _alibi(layer, block), _temperature(layer, block)
            attended = _attend(layer, query, *read, block.mask, block.causal, *changes, sinks)
            out[tokens] = attended.permute(2, 0, 1, 3).flatten(1, 2)


class _Workspace:
    """A buffer for gathered keys or values. It is reused, because fresh memory costs more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=dtype)

    def read(self, pool: Tensor, slots: PoolSlots) -> Tensor:
        """pool[slots], [n, kv_heads, dim], valid until the next call; a view if the slots are consecutive."""
        if slots.start is not None:
            return pool.narrow(0, slots.start, slots.count)
        width = pool.shape[1] * pool.shape[2]
        size = slots.count * width
        if self._memory.shape[0] < size:
            self._memory = torch.empty(size + size // 2, dtype=self._dtype)
        out = self._memory[:size].view(slots.count, pool.shape[1], pool.shape[2])
        return torch.index_select(pool, 0, slots.indices, out=out)


def _alibi(layer: AttentionLayer, read: DecodeGroup | Block) -> Tensor | None:
    """What ALiBi adds to the scores, float32, in the shape of `_attend`'s scores; None without it."""
    if layer.alibi is None:
        return None
    slopes = torch.tensor(layer.alibi).view(layer.kv_heads, -1, 1)
    return read.distances() * (slopes if isinstance(read, DecodeGroup) else slopes.unsqueeze(-1))


def _temperature(layer: AttentionLayer, read: DecodeGroup | Block) -> Tensor | None:
    """By what the scores of each query are multiplied, float32, to be broadcast with them; None without it."""
    if layer.temperature_from is None:
        return None
    positions = read.query_positions().clamp_(min=layer.temperature_from)
    return positions.log_().div_(math.log(layer.temperature_from))


def _sinks(layer: AttentionLayer) -> Tensor | None:
    """The scores of sinks, float32 [kv_heads, heads per KV head, 1]; None without them."""
    if layer.sink_scores is None:
        return None
    return torch.tensor(layer.sink_scores).view(layer.kv_heads, -1, 1)


def _attend(
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    bias: Tensor | None,
    temperature: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scaled dot-product attention over the last two axes; key and value are cast to the query's dtype.

    `bias` is added to the scores in float32, because half precision would round that of far keys by several units.
    """
    if key.dtype != query.dtype or value.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
        mask = None if mask is None else mask.to(query.dtype)
    if layer.soft_cap is None and bias is None and temperature is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=layer.scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).float().mul_(layer.scale / (layer.soft_cap or 1.0))
    if layer.soft_cap is not None:
        scores.tanh_().mul_(layer.soft_cap)
    if temperature is not None:
        scores *= temperature
    if bias is not None:
        scores += bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    elif mask is not None:
        scores += mask
    if sinks is not None:
        keys = scores.shape[-1]
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :keys]
        return torch.matmul(scores.to(query.dtype), value)
    return torch.matmul(scores.softmax(-1).to(query.dtype), value)
