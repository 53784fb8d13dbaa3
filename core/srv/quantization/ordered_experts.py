"""Experts whose quantized matrices have inputs in the order of their groups (GPTQ's desc_act), not of the hidden size.

    x ── for each of a token's experts: the columns in the order of its gate and up projection ── experts ── sum

The order of a down projection becomes that of the rows of the gate and the up projection before it, so that no op has
to know of it. Must not know how checkpoints state orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import DOWN, GATE, UP, ExpertWeights
from srv.models.layers.op_layer import OpLayer
from srv.quantization.gguf_experts import GGUFExperts

_INDEX_BYTES = 64 << 20  # of the columns of as many tokens as are gathered at a time
_ORDER = "columns"  # the suffix of the tensors that a loader fills with orders


class OrderedExperts(ExpertWeights):
    """`inner`: the experts on matrices whose columns are in order, which a platform may give another kernel.

    gate_up_columns int64 [E, 2, H]: those of the gate and of the up projection, which must be equal; down_columns int64
    [E, I].
    """

    op = ""
    delegates = True

    def __init__(self, context: BuildContext, inner: GGUFExperts) -> None:
        OpLayer.__init__(self)  # it has no op of its own to bind
        self.inner, self.prefix, self.sizes = inner, inner.prefix, inner.sizes
        self.dtype, self.inputs, self.implementation = inner.dtype, inner.inputs, inner.implementation
        experts, hidden, inter = self.sizes.experts, self.sizes.hidden, self.sizes.intermediate
        self.gate_up_columns = context.empty(experts, 2, hidden, dtype=torch.int64)
        self.down_columns = context.empty(experts, inter, dtype=torch.int64)
        self._shared = False  # whether all experts have the same order of inputs; known when it is loaded
        self.kernel = self.compute

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        columns = self.gate_up_columns[:, 0]
        if self._shared:
            return self.inner.kernel(x.index_select(-1, columns[0]), ids, weights)
        (tokens, chosen), hidden = ids.shape, self.sizes.hidden
        rows = x.new_empty(tokens, chosen, hidden)
        at_once = max(_INDEX_BYTES // (chosen * hidden * columns.itemsize), 1)
        for begin in range(0, tokens, at_once):
            part = slice(begin, begin + at_once)
            order = columns[ids[part].clamp(0, self.sizes.experts - 1)]
            torch.gather(x[part].unsqueeze(1).expand(order.shape), 2, order, out=rows[part])
        out = self.inner.kernel(rows.flatten(0, 1), ids.reshape(-1, 1), weights.reshape(-1, 1))
        return out.view(rows.shape).sum(1)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ()

    def weight_matrices(self) -> tuple[Tensor, ...]:
        return ()

    def weight_views(self) -> dict[str, Tensor]:
        views = self.inner.weight_views()
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_columns, self.down_columns, strict=True)):
            for name, order in ((GATE, gate_up[0]), (UP, gate_up[1]), (DOWN, down)):
                views[f"{self.prefix}.{expert}.{name}.{_ORDER}"] = order
        return views

    def weight_slices(self) -> dict[str, Slice]:
        return self.inner.weight_slices()

    def validate_loaded(self) -> str | None:
        """As the base class; then puts the rows of gate and up projection in the order of the down projection."""
        gate, up = self.gate_up_columns.unbind(1)
        different = (gate != up).any(1).nonzero().flatten().tolist()
        if different:
            name = f"{self.prefix}.{different[0]}"
            return f"the inputs of {name}.{GATE} are in another order than those of {name}.{UP}, which are the same"
        self._shared = bool((gate == gate[:1]).all())
        for fused in (self.inner.gate_up, self.inner.gate_up_bias):
            for order, rows in zip(self.down_columns, () if fused is None else fused, strict=fused is not None):
                for half in rows.chunk(2):
                    half.copy_(half[order.to(half.device)])  # layers may be in host memory
        return self.inner.validate_loaded()
