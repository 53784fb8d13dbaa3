"""A gated linear recurrence after a convolution over time (RecurrentGemma): its state is one number per channel.

    x ─┬─ linear_x ─ convolution over time ─┬─ gates ─ decay ──────┐
       │                                    └─(·)─ recurrence ─(·)─ linear_out
       └─ linear_y ─ GELU ────────────────────────────────────┘

(De et al. 2024, arXiv:2402.19427: the real-gated linear recurrent unit.) Owns weights and the names that checkpoints
give to them. Must not know requests, as `srv.models.modules.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint.recurrent import LinearRecurrence
from srv.models.layers.context import BuildContext
from srv.models.modules.mixer import Mixer
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

CONV, STATE = "conv", "state"  # the names of the states
DECAY = -8.0  # the paper's c: the logarithm of the strongest decay, in units of softplus(recurrent_param)


class RecurrentBlock(Mixer):
    """[T, hidden] -> [T, hidden] over the states "conv" ``[C, W]`` and "state" ``[C]`` of each row.

    `heads`: the blocks of channels whose gates read the channels of their own block only.
    """

    def __init__(self, part: LinearRecurrence, place: Place) -> None:
        super().__init__()
        context, ranks = place.context, place.context.group.size
        (channels, width), heads = part.sizes.of_rank(ranks), part.heads // ranks
        self.slices = place.slices(part.tensors)
        block = channels // heads
        self.prefix, self.place, self.heads = place.prefix, context.state_place(place.layer), heads
        self.in_proj, self.out_proj = place.linear(part.inputs), place.linear(part.output)
        self.conv_weight, self.conv_bias = context.empty(channels, width), context.empty(channels)
        self.gate_weights = context.empty(2, heads, block, block)  # of inputs, and of the recurrence
        self.gate_biases = context.empty(2, heads, block)
        self.recurrent_param = context.empty(channels)
        self.decay_rate: Tensor
        rate = torch.empty(channels, dtype=torch.float32, device=context.device)
        self.register_buffer("decay_rate", rate, persistent=False)
        self._conv = self._bind(context, "causal_conv1d", {"channels": channels, "width": width})
        self._recurrence = self._bind(context, "gated_linear_recurrence", {"channels": channels})

    @staticmethod
    def _bind(context: BuildContext, op: str, sizes: Mapping[str, int]) -> Callable[..., tuple[Tensor, Tensor]]:
        bound: Callable[..., Any] = context.ops.bind(op, OpArgs(context.dtype, sizes))
        return bound

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """The first token of a request enters the recurrence as it is, whatever its gate."""
        states, first = context.states(*self.place), (inputs.positions == 0).unsqueeze(-1)
        conv, state = states.tensors[CONV], states.tensors[STATE]
        mixed, y = self.in_proj.kernel(x).chunk(2, -1)
        mixed, new_conv = self._conv(mixed, self.conv_weight, self.conv_bias, conv, states.slots, states.lens, "none")
        conv.index_copy_(0, states.slots, new_conv.to(conv.dtype))
        input_gate, recurrent_gate = self._gates(mixed)
        decay = self.decay_rate * recurrent_gate.float()
        scale = torch.where(first, 1.0, (-torch.expm1(2 * decay)).sqrt())
        given = mixed * input_gate * scale.to(x.dtype)
        out, new_state = self._recurrence(given, decay, state, states.slots, states.lens)
        state.index_copy_(0, states.slots, new_state.to(state.dtype))
        return self.out_proj.kernel(out.to(x.dtype) * F.gelu(y, approximate="tanh"))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, C] -> the gates of inputs and of the recurrence, each [T, C], between 0 and 1."""
        blocks = x.reshape(len(x), self.heads, -1).transpose(0, 1)
        gates = (
            torch.baddbmm(bias.unsqueeze(1), blocks, weight).transpose(0, 1).reshape(len(x), -1).sigmoid()
            for weight, bias in zip(self.gate_weights, self.gate_biases, strict=True)
        )
        of_inputs, of_recurrence = gates
        return of_inputs, of_recurrence

    def prepare_loaded(self) -> None:
        torch.mul(F.softplus(self.recurrent_param.float()), DECAY, out=self.decay_rate)

    def weight_views(self) -> dict[str, Tensor]:
        views = {
            f"{self.prefix}.conv_1d.weight": self.conv_weight.unsqueeze(1),
            f"{self.prefix}.conv_1d.bias": self.conv_bias,
            f"{self.prefix}.rg_lru.recurrent_param": self.recurrent_param,
        }
        for number, name in enumerate(("input_gate", "recurrent_gate")):
            views[f"{self.prefix}.rg_lru.{name}_weight"] = self.gate_weights[number]
            views[f"{self.prefix}.rg_lru.{name}_bias"] = self.gate_biases[number]
        return views
