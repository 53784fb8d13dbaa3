"""Writes into the KV cache, over host views."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, INDICES, Rules


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


def _check_range(rules: Rules, argument: str, places: Tensor, limits: Tensor) -> None:
    """The real operators write to wherever an index points; here one outside is found."""
    if places.numel() and bool(((places < 0) | (places >= limits)).any()):
        wrong = places[((places < 0) | (places >= limits)).any(-1)][0].tolist()
        rules.that(False, argument, f"{wrong} in one place", f"must be within 0 and {(limits - 1).tolist()}")
