"""A short convolution over time between two gates (LFM2): a layer whose state is the last few inputs.

    x ─ in_proj ─┬─ b ─(·)─ convolution over time ─(·)─ out_proj
                 ├─ u ──┘                           │
                 └─ c ──────────────────────────────┘

Owns weights and the names that checkpoints give to them. Must not know requests, as `srv.models.modules.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import recurrent as recurrent_parts
from srv.models.modules.mixer import Mixer
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

CONV = "conv"  # the name of the state


class ShortConvolution(Mixer):
    """[T, hidden] -> [T, hidden] over the state "conv" ``[channels, width]`` of each row."""

    def __init__(self, part: recurrent_parts.ShortConvolution, place: Place) -> None:
        super().__init__()
        context, (channels, width) = place.context, part.sizes.of_rank(place.context.group.size)
        self.slices = place.slices(part.convolution)
        self.prefix, self.place = place.prefix, context.state_place(place.layer)
        self.in_proj, self.out_proj = place.linear(part.inputs), place.linear(part.output)
        self.conv_weight = context.empty(channels, width)
        self.conv_bias = context.empty(channels) if part.inputs.bias else None
        args = OpArgs(context.dtype, {"channels": channels, "width": width})
        self._conv: Callable[..., Any] = context.ops.bind("causal_conv1d", args)

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        states = context.states(*self.place)
        before, after, u = self.in_proj.kernel(x).chunk(3, -1)
        kept = states.tensors[CONV]
        mixed, new = self._conv(before * u, self.conv_weight, self.conv_bias, kept, states.slots, states.lens, "none")
        kept.index_copy_(0, states.slots, new.to(kept.dtype))
        return self.out_proj.kernel(after * mixed)

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {f"{self.prefix}.conv.weight": self.conv_weight.unsqueeze(1)}
        if self.conv_bias is not None:
            views[f"{self.prefix}.conv.bias"] = self.conv_bias
        return views
