"""A Mamba layer (Gu and Dao 2023, arXiv:2312.00752): a state of several numbers per channel.

    x ─ in_proj ─┬─ convolution over time ─┬─ values ──────────────────────────────── scan ─(+ D values)─(·)─ out_proj
                 │                         └─ x_proj ─┬─ [norm] ─ dt_proj ─ softplus ─┤                    │
                 │                                    └─ b, c ─ [norm] ───────────────┘                    │
                 └─ gates ─ silu ──────────────────────────────────────────────────────────────────────────┘

Owns weights and the names that checkpoints give to them. Must not know requests, as `srv.models.modules.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import recurrent as recurrent_parts
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

CONV, STATE = "conv", "state"  # the names of the states


class SelectiveScan(Mixer):
    """[T, hidden] -> [T, hidden] over the states "conv" ``[C, W]`` and "state" ``[C, N]`` of each row.

    The bias of steps is added in float32. Ranks divide channels; steps, b and c follow from all channels.
    """

    def __init__(self, part: recurrent_parts.SelectiveScan, place: Place) -> None:
        super().__init__()
        context, sizes = place.context, part.sizes.of_rank(place.context.group.size)
        self.slices, self.communicator = place.slices(part.tensors), context.communicator
        self.prefix, self.sizes, self.place = place.prefix, sizes, context.state_place(place.layer)
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = map(
            place.linear, (part.inputs, part.parameters, part.steps, part.output)
        )
        self.norms = nn.ModuleList(make_norm(each, place) for each in part.norms)
        self.conv_weight = context.empty(sizes.channels, sizes.width)
        self.conv_bias = context.empty(sizes.channels) if sizes.conv_bias else None
        self.dt_bias, self.skip = context.empty(sizes.channels), context.empty(sizes.channels)
        self.a_log = context.empty(sizes.channels, sizes.state_size)
        self.rates: Tensor
        rates = torch.empty(sizes.channels, sizes.state_size, dtype=torch.float32, device=context.device)
        self.register_buffer("rates", rates, persistent=False)
        convolved = OpArgs(context.dtype, {"channels": sizes.channels, "width": sizes.width})
        self._conv: Callable[..., Any] = context.ops.bind("causal_conv1d", convolved)
        self._scan: Callable[..., Any] = context.ops.bind("selective_scan", OpArgs(context.dtype, sizes.op_sizes))

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        sizes, states = self.sizes, context.states(*self.place)
        values, gates = self.in_proj.kernel(x).chunk(2, -1)
        conv, state = states.tensors[CONV], states.tensors[STATE]
        values, new_conv = self._conv(values, self.conv_weight, self.conv_bias, conv, states.slots, states.lens)
        conv.index_copy_(0, states.slots, new_conv.to(conv.dtype))
        parameters = self.x_proj.kernel(values)  # of several ranks, a partial sum
        if self.communicator is not None:
            parameters = self.communicator.all_reduce(parameters)
        steps, b, c = parameters.split_with_sizes((sizes.rank, sizes.state_size, sizes.state_size), -1)
        if self.norms:
            steps, b, c = (norm(each.contiguous()) for norm, each in zip(self.norms, (steps, b, c), strict=True))
        step = F.softplus(self.dt_proj.kernel(steps).float() + self.dt_bias)
        out, new_state = self._scan(values, b, c, self.rates, step, state, states.slots, states.lens)
        state.index_copy_(0, states.slots, new_state.to(state.dtype))
        out = (out + values.float() * self.skip) * F.silu(gates.float())
        return self.out_proj.kernel(out.to(x.dtype))

    def prepare_loaded(self) -> None:
        torch.neg(self.a_log.float().exp(), out=self.rates)

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {
            f"{self.prefix}.conv1d.weight": self.conv_weight.unsqueeze(1),
            f"{self.prefix}.dt_proj.bias": self.dt_bias,
            f"{self.prefix}.A_log": self.a_log,
            f"{self.prefix}.D": self.skip,
        }
        return views if self.conv_bias is None else {**views, f"{self.prefix}.conv1d.bias": self.conv_bias}
