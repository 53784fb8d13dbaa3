"""Check that a model from transformers computes the same with our attention as with its own, before it is served.

A model can be served if its logits depend neither on how its tokens are split into chunks, nor on the other tokens of
the batch. Only this check detects architectures that mix tokens outside attention, or that ignore their positions.

    own attention:    tokens 0..7 in one pass
    our attention:    pass 1: A 0..4        pass 2: A 5..7, B 0..7      (A and B the same tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from srv.specs import AttentionLayer

LENGTH, FIRST_CHUNK = 8, 5  # tokens
Row = tuple[str, int, int]  # (sequence, first position, number of tokens)


class DenseCache:
    """A simple replacement of the KV pool: keys and values of whole sequences, with attention in float32."""

    def __init__(self) -> None:
        self.rows: Sequence[Row] = ()
        self._seen: dict[tuple[int, int, str], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
        parts: list[Tensor] = []
        start = 0
        for sequence, _, count in self.rows:
            keys, values = k[start : start + count], v[start : start + count]
            if (layer.group, layer.index, sequence) in self._seen:
                old_keys, old_values = self._seen[layer.group, layer.index, sequence]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self._seen[layer.group, layer.index, sequence] = keys, values
            parts.append(dense_attention(layer, q[start : start + count], keys, values))
            start += count
        return torch.cat(parts)


def dense_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last len(q) tokens of one sequence to the whole sequence. Shapes as in `attend`."""
    k, v = (part.float().repeat_interleave(layer.heads // layer.kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.temperature_from is not None:
        positions = torch.arange(len(k) - len(q), len(k)).float().clamp(min=layer.temperature_from)
        scores *= (positions.log() / math.log(layer.temperature_from))[:, None].to(scores.device)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None, :]
    if layer.bidirectional:
        distance = distance.abs()
    if layer.alibi is not None:
        scores -= (torch.tensor(layer.alibi)[:, None, None] * distance).to(scores.device)
    hidden = distance < 0
    if layer.bias_values is not None:
        values, most = torch.tensor(layer.bias_values), len(layer.bias_values[0]) // 2
        offset = torch.arange(len(k))[None, :] - torch.arange(len(k) - len(q), len(k))[:, None]
        scores += values[:, offset.clamp(-most, most) + most].to(scores.device)
    if layer.window is not None:
        hidden |= distance >= layer.window
    if layer.chunk is not None:
        own = torch.arange(len(k) - len(q), len(k))[:, None] // layer.chunk
        hidden |= torch.arange(len(k))[None, :] // layer.chunk != own
    scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    if layer.sink_scores is not None:
        sinks = torch.tensor(layer.sink_scores)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sinks.to(scores.device)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v).to(q.dtype)


def largest_difference(
    vocab_size: int,
    device: torch.device,
    own: Callable[[Tensor], Tensor],
    ours: Callable[[Tensor, Tensor, DenseCache], Tensor],
) -> float:
    """The relative difference of the logits, |ours - own| / |own|, over both passes.

    `own(tokens)` computes a whole sequence with the model's own attention, `ours(tokens, positions, cache)` one pass
    with our attention; both return logits [T, vocab].
    """
    tokens = (torch.arange(LENGTH) * 37 + 11).remainder(vocab_size).to(device)
    positions = torch.arange(LENGTH, device=device)
    expected = own(tokens).float()
    cache = DenseCache()
    cache.rows = (("A", 0, FIRST_CHUNK),)
    first = ours(tokens[:FIRST_CHUNK], positions[:FIRST_CHUNK], cache)
    cache.rows = (("A", FIRST_CHUNK, LENGTH - FIRST_CHUNK), ("B", 0, LENGTH))
    second = ours(torch.cat((tokens[FIRST_CHUNK:], tokens)), torch.cat((positions[FIRST_CHUNK:], positions)), cache)
    actual = torch.cat((first, second)).float()
    difference = (actual - torch.cat((expected, expected))).norm() / expected.norm().clamp_min(1e-6)
    return float(difference)
