"""Lightning attention (Qin et al. 2024, arXiv:2401.04658): linear attention with a constant decay for each head.

    x ─┬─ qkv_proj ─ silu ─ scan ─ norm ─(·)─ out_proj
       └─ output_gate ─ sigmoid ──────────┘

Owns weights and the names that checkpoints give to them. Must not know requests, as `srv.models.modules.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint.recurrent import Lightning
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import DividedNorm, make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs

STATE = "state"  # the name of the state


class LightningAttention(Mixer):
    """[T, hidden] -> [T, hidden] over the state "state" ``[H, V, K]`` of each row."""

    def __init__(self, part: Lightning, place: Place) -> None:
        super().__init__()
        context, sizes = place.context, part.sizes.of_rank(place.context.group.size)
        self.sizes, self.place = sizes, context.state_place(place.layer)
        self.qkv_proj, self.output_gate, self.out_proj = map(place.linear, (part.qkv, part.gate, part.output))
        self.norm = DividedNorm(part.norm, place) if context.group.size > 1 else make_norm(part.norm, place)
        self.decay: Tensor
        heads, (first, end) = part.sizes.heads, context.group.share(part.sizes.heads)
        exponents = torch.arange(first + 1, end + 1, device=context.device)
        self.register_buffer("decay", -((2 ** (-8 / heads)) ** exponents) * part.decay, persistent=False)
        self._scan: Callable[..., Any] = context.ops.bind("state_space_scan", OpArgs(context.dtype, sizes.op_sizes))

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        sizes, states = self.sizes, context.states(*self.place)
        qkv = F.silu(self.qkv_proj.kernel(x)).reshape(-1, sizes.heads, 3 * sizes.head_dim)
        q, k, v = qkv.chunk(3, -1)
        state, decay = states.tensors[STATE], self.decay.expand(len(x), -1)
        out, new = self._scan(v, k, q, decay, None, state, states.slots, states.lens)
        state.index_copy_(0, states.slots, new.to(state.dtype))
        normed = self.norm.forward(out.flatten(1).to(x.dtype))
        return self.out_proj.kernel(self.output_gate.kernel(x).sigmoid() * normed)
