"""Writes into the KV cache, over host views."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, HALVES, INDICES, Rules


def scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """self[indices[i]] = updates[i]. indices: [..., k] over the first k dimensions of self."""
    rules = Rules("npu_scatter_nd_update_")
    rules.dtype("self", self, (*FLOATS, torch.int8, torch.int64, torch.bool))
    rules.that(1 <= self.dim() <= 8, "self", f"of shape {tuple(self.shape)}", "must have 1 to 8 dimensions")
    rules.dtype("indices", indices, INDICES)
    described = f"of shape {tuple(indices.shape)}"
    rules.that(indices.dim() >= 2, "indices", described, "must have at least 2 dimensions; slots go as [n, 1]")
    depth = indices.shape[-1]
    rules.that(1 <= depth <= self.dim(), "indices", described, f"must have 1 to {self.dim()} entries along the last")
    rules.same_dtype("updates", updates, "self", self.dtype)
    rules.shape("updates", updates, (*indices.shape[:-1], *self.shape[depth:]), "one row of self for each index")
    places = indices.reshape(-1, depth).long()
    _check_range(rules, "indices", places, torch.tensor(self.shape[:depth]))
    self.index_put_(tuple(places.unbind(-1)), updates.reshape(-1, *self.shape[depth:]))
    return self


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """key[i], value[i] go to slot slot_indices[i] of the caches.

    key, value: [tokens, KV heads, D]; caches [blocks, block size, KV heads, D]; slot_indices int32 [tokens].
    """
    rules = Rules("_npu_reshape_and_cache")
    rules.dtype("key", key, (*HALVES, torch.int8))
    rules.dims("key", key, 3)
    rules.dims("value", value, 3)
    rules.shape("value", value, (*key.shape[:2], value.shape[2]), "the tokens and heads of key")
    for name, cache, of, new in (("key_cache", key_cache, "key", key), ("value_cache", value_cache, "value", value)):
        rules.dims(name, cache, 4)
        rules.contiguous(of, new)
        rules.contiguous(name, cache)
        rules.same_dtype(name, cache, of, new.dtype)
        rules.shape(name, cache, (*cache.shape[:2], *new.shape[1:]), f"the heads and head dim of {of}")
    rules.same_dtype("value", value, "key", key.dtype)
    rules.shape("value_cache", value_cache, (*key_cache.shape[:3], value.shape[2]), "the blocks of key_cache")
    rules.dtype("slot_indices", slot_indices, (torch.int32,))
    rules.contiguous("slot_indices", slot_indices)
    rules.shape("slot_indices", slot_indices, key.shape[:1], "one slot a token")
    slots = slot_indices.long()
    _check_range(rules, "slot_indices", slots[:, None], torch.tensor([key_cache.shape[0] * key_cache.shape[1]]))
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)


def _check_range(rules: Rules, argument: str, places: Tensor, limits: Tensor) -> None:
    """The real operators write to wherever an index points; here one outside is found."""
    if places.numel() and bool(((places < 0) | (places >= limits)).any()):
        wrong = places[((places < 0) | (places >= limits)).any(-1)][0].tolist()
        rules.that(False, argument, f"{wrong} in one place", f"must be within 0 and {(limits - 1).tolist()}")
