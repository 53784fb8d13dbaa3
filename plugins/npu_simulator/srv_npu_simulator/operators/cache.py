"""Writes to the KV cache, on host views."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, INDICES, Rules


def scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """self[indices[i]] = updates[i]. indices: [..., k] over the first k dimensions of self."""
    rules = Rules("npu_scatter_nd_update_")
    rules.dtype("self", self, (*FLOATS, torch.int8, torch.int64, torch.bool))
    rules.require(1 <= self.dim() <= 8, "self", f"of shape {tuple(self.shape)}", "must have 1 to 8 dimensions")
    rules.dtype("indices", indices, INDICES)
    described = f"of shape {tuple(indices.shape)}"
    rules.require(indices.dim() >= 2, "indices", described, "must have at least 2 dimensions; slots go as [n, 1]")
    depth = indices.shape[-1]
    rules.require(1 <= depth <= self.dim(), "indices", described, f"must have 1 to {self.dim()} entries along the last")
    rules.same_dtype("updates", updates, "self", self.dtype)
    rules.shape("updates", updates, (*indices.shape[:-1], *self.shape[depth:]), "one row of self for each index")
    positions = indices.reshape(-1, depth).long()
    _check_range(rules, "indices", positions, torch.tensor(self.shape[:depth]))
    self.index_put_(tuple(positions.unbind(-1)), updates.reshape(-1, *self.shape[depth:]))
    return self


def _check_range(rules: Rules, argument: str, positions: Tensor, limits: Tensor) -> None:
    """Refuse an index that is out of range, which the real operator does not check."""
    if positions.numel() and bool(((positions < 0) | (positions >= limits)).any()):
        wrong = positions[((positions < 0) | (positions >= limits)).any(-1)][0].tolist()
        rules.require(False, argument, f"{wrong} in one place", f"must be within 0 and {(limits - 1).tolist()}")
