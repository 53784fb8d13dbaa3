"""The gated delta rule: a layer with a recurrent state of a fixed size in the place of keys and values.

    x ─ in_proj ─┬─ q, k, v ─ convolution over time ─ delta rule ─ norm ─(·)─ out_proj
                 ├─ b, a ─ rate and decay ──────────────┘                 │
                 └─ z ─ silu ─────────────────────────────────────────────┘

(Yang et al. 2024, arXiv:2412.06464.) Owns weights and the names that checkpoints give to them. Must not know requests:
`context.states` has the states of the step's rows, and the layer writes the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint.recurrent import DeltaNet
from srv.models.layers.context import BuildContext
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

CONV, STATE = "conv", "state"  # the names of the states


class GatedDeltaNet(Mixer):
    """[T, hidden] -> [T, hidden] over the states "conv" ``[C, W]`` and "state" ``[HV, K, V]`` of each row."""

    def __init__(self, part: DeltaNet, place: Place) -> None:
        super().__init__()
        context, sizes = place.context, part.sizes.of_rank(place.context.group.size)
        self.slices = place.slices(part.tensors)
        self.prefix, self.sizes, self.place = place.prefix, sizes, context.state_place(place.layer)
        self._parts = (sizes.keys, sizes.keys, sizes.values)
        self.in_proj, self.rates_proj, self.out_proj = map(place.linear, (part.inputs, part.rates, part.output))
        self.conv_weight = context.empty(sizes.channels, sizes.width)
        self.dt_bias, self.a_log = context.empty(sizes.value_heads), context.empty(sizes.value_heads)
        self.decay_rate: Tensor
        rate = torch.empty(sizes.value_heads, dtype=torch.float32, device=context.device)
        self.register_buffer("decay_rate", rate, persistent=False)
        self.norm = make_norm(part.norm, place)
        self._conv = self._bind(context, "causal_conv1d", {"channels": sizes.channels, "width": sizes.width})
        dims = {"key_dim": sizes.key_dim, "value_dim": sizes.value_dim}
        heads = {"key_heads": sizes.key_heads, "value_heads": sizes.value_heads}
        self._rule = self._bind(context, "gated_delta_rule", {**heads, **dims})

    @staticmethod
    def _bind(context: BuildContext, op: str, sizes: Mapping[str, int]) -> Callable[..., tuple[Tensor, Tensor]]:
        bound: Callable[..., Any] = context.ops.bind(op, OpArgs(context.dtype, sizes))
        return bound

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        sizes, states = self.sizes, context.states(*self.place)
        mixed, z, b, a = self._divided(self.in_proj.kernel(x), self.rates_proj.kernel(x))
        conv, state = states.tensors[CONV], states.tensors[STATE]
        mixed, new_conv = self._conv(mixed, self.conv_weight, None, conv, states.slots, states.lens)
        conv.index_copy_(0, states.slots, new_conv.to(conv.dtype))
        q, k, v = mixed.split_with_sizes(self._parts, -1)
        decay = self.decay_rate * F.softplus(a.float() + self.dt_bias)
        out, new_state = self._rule(
            q.reshape(-1, sizes.key_heads, sizes.key_dim),
            k.reshape(-1, sizes.key_heads, sizes.key_dim),
            v.reshape(-1, sizes.value_heads, sizes.value_dim),
            decay,
            b.sigmoid().float() * (2.0 if sizes.negative else 1.0),
            state,
            states.slots,
            states.lens,
        )
        state.index_copy_(0, states.slots, new_state.to(state.dtype))
        normed = self.norm.forward(out.reshape(-1, sizes.value_dim).to(x.dtype))
        gated = (normed * F.silu(z.reshape(-1, sizes.value_dim).float())).to(x.dtype)
        if sizes.tiled:
            gated = gated.view(len(x), sizes.key_heads, -1, sizes.value_dim).transpose(1, 2)
        return self.out_proj.kernel(gated.reshape(len(x), -1))

    def _divided(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries, keys and values [T, C], gates z [T, HV · V], b and a [T, HV])."""
        sizes, tokens = self.sizes, len(qkvz)
        if not sizes.by_heads:
            (mixed, z), (b, a) = qkvz.split_with_sizes((sizes.channels, sizes.values), -1), ba.chunk(2, -1)
            return mixed, z, b, a
        each = sizes.value_heads // sizes.key_heads
        values = each * sizes.value_dim
        parts = qkvz.reshape(tokens, sizes.key_heads, -1)
        q, k, v, z = parts.split_with_sizes((sizes.key_dim, sizes.key_dim, values, values), -1)
        b, a = ba.reshape(tokens, sizes.key_heads, 2 * each).chunk(2, -1)
        mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], -1)
        return mixed, z.reshape(tokens, -1), b.reshape(tokens, -1), a.reshape(tokens, -1)

    def prepare_loaded(self) -> None:
        torch.neg(self.a_log.float().exp(), out=self.decay_rate)

    def weight_views(self) -> dict[str, Tensor]:
        parts = self.conv_weight.unsqueeze(1).split_with_sizes(list(self.sizes.convolutions.values()))
        names = (f"{self.prefix}.{name}.weight" for name in self.sizes.convolutions)
        return {
            **dict(zip(names, parts, strict=True)),
            f"{self.prefix}.dt_bias": self.dt_bias,
            f"{self.prefix}.A_log": self.a_log,
        }
