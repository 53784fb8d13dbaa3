"""A Mamba-2 layer (Dao and Gu 2024, arXiv:2405.21060): a recurrent state in the place of keys and values.

    x ─ in_proj ─┬─ values, b, c ─ convolution over time ─ scan ─(+ D values)─(· silu)─ norm ─ out_proj
                 ├─ steps ─ softplus ───────────────────────┘                   │
                 └─ gates ──────────────────────────────────────────────────────┘

Owns weights and the names that checkpoints give to them. Must not know requests, as `srv.models.modules.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import recurrent as recurrent_parts
from srv.models.layers.op_layer import TORCH
from srv.models.layers.recurrent_sizes import GATED_NORM, StateSpaceSizes
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import GroupMeans
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

CONV, STATE = "conv", "state"  # the names of the states


class StateSpace(Mixer):
    """[T, hidden] -> [T, hidden] over the states "conv" ``[C, W]`` and "state" ``[H, P, N]`` of each row."""

    def __init__(self, part: recurrent_parts.StateSpace, place: Place) -> None:
        super().__init__()
        context, sizes = place.context, part.sizes.of_rank(place.context.group.size)
        scan = sizes.scan
        self.slices = place.slices(part.tensors)
        self.prefix, self.sizes, self.eps = place.prefix, sizes, part.norm_eps
        self.place = context.state_place(place.layer)
        self.in_proj, self.out_proj = place.linear(part.inputs), place.linear(part.output)
        self.conv_weight = context.empty(sizes.channels, sizes.width)
        self.conv_bias = context.empty(sizes.channels) if sizes.conv_bias else None
        self.dt_bias, self.a_log, self.skip = (context.empty(scan.heads) for _ in range(3))
        self.decay_rate: Tensor
        rate = torch.empty(scan.heads, dtype=torch.float32, device=context.device)
        self.register_buffer("decay_rate", rate, persistent=False)
        self.norm_weight = context.empty(scan.inner) if sizes.norm else None
        self.means = GroupMeans.of(part.sizes.scan.groups, context)
        if sizes.norm:
            context.ops.note_own(GATED_NORM, OpArgs(context.dtype, {"dim": scan.inner // scan.groups}), TORCH)
        self.input_factors: Tensor | None
        factors = _factors(sizes, part.input_factors)
        self.register_buffer("input_factors", None if factors is None else factors.to(context.device), persistent=False)
        args = OpArgs(context.dtype, {"channels": sizes.channels, "width": sizes.width})
        self._conv: Callable[..., Any] = context.ops.bind("causal_conv1d", args)
        self._scan: Callable[..., Any] = context.ops.bind("state_space_scan", OpArgs(context.dtype, scan.op_sizes))

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        sizes, scan, states = self.sizes, self.sizes.scan, context.states(*self.place)
        projected = self.in_proj.kernel(x)
        if self.input_factors is not None:
            projected = (projected * self.input_factors).to(x.dtype)
        gates, mixed, steps = projected.split_with_sizes((scan.inner, sizes.channels, scan.heads), -1)
        conv, state = states.tensors[CONV], states.tensors[STATE]
        mixed, new_conv = self._conv(mixed, self.conv_weight, self.conv_bias, conv, states.slots, states.lens)
        conv.index_copy_(0, states.slots, new_conv.to(conv.dtype))
        values, b, c = mixed.split_with_sizes((scan.inner, scan.keys, scan.keys), -1)
        values = values.reshape(-1, scan.heads, scan.head_dim)
        step = F.softplus(steps.float() + self.dt_bias)
        out, new_state = self._scan(
            values,
            b.reshape(-1, scan.groups, scan.state_size),
            c.reshape(-1, scan.groups, scan.state_size),
            self.decay_rate * step,
            step,
            state,
            states.slots,
            states.lens,
        )
        state.index_copy_(0, states.slots, new_state.to(state.dtype))
        out = out + values.float() * self.skip.unsqueeze(-1)
        return self.out_proj.kernel(self._gated(out.flatten(1), gates).to(x.dtype))

    def _gated(self, out: Tensor, gates: Tensor) -> Tensor:
        """out float32 [T, inner] times the gates, normalised before or after that."""
        gates = F.silu(gates.float())
        if self.norm_weight is None:
            return out * gates
        if self.sizes.norm_first:
            return self._normed(out, self.norm_weight) * gates
        return self._normed(out * gates, self.norm_weight)

    def _normed(self, out: Tensor, weight: Tensor) -> Tensor:
        groups = out.view(len(out), self.sizes.scan.groups, -1)
        if self.means is not None:
            normed = out * torch.rsqrt(self.means.of_squares(out) + self.eps)
        else:
            normed = F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(1)
        return normed.to(weight.dtype) * weight

    def prepare_loaded(self) -> None:
        torch.neg(self.a_log.float().exp(), out=self.decay_rate)

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {
            f"{self.prefix}.conv1d.weight": self.conv_weight.unsqueeze(1),
            f"{self.prefix}.dt_bias": self.dt_bias,
            f"{self.prefix}.A_log": self.a_log,
            f"{self.prefix}.D": self.skip,
        }
        if self.conv_bias is not None:
            views[f"{self.prefix}.conv1d.bias"] = self.conv_bias
        if self.norm_weight is not None:
            views[f"{self.prefix}.norm.weight"] = self.norm_weight
        return views


def _factors(sizes: StateSpaceSizes, factors: Sequence[float]) -> Tensor | None:
    """By which the rows of the input projection are multiplied, float32; None for none."""
    if not factors:
        return None
    scan = sizes.scan
    counts = torch.tensor((scan.inner, scan.inner, scan.keys, scan.keys, scan.heads))
    return torch.tensor(factors).repeat_interleave(counts)
