"""Lightning attention (Qin et al. 2024, arXiv:2401.04658): linear attention with a constant decay for each head.

    x ─┬─ qkv_proj ─ silu ─ scan ─ norm ─(·)─ out_proj
       └─ output_gate ─ sigmoid ──────────┘

Owns weights and the names that checkpoints give to them. Must not know requests, as `srv.models.layers.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import RMSNorm
from srv.models.layers.recurrent_sizes import ScanSizes
from srv.models.layers.states import StateLayer, StatesOf
from srv.platform.interface import OpArgs

STATE = "state"  # the name of the state


class LightningAttention(StateLayer):
    """[T, hidden] -> [T, hidden] over the state "state" ``[H, V, K]`` of each row.

    `share`: by which decays are multiplied: from 1 in the first layer down to nearly 0 in the last one.
    """

    def __init__(
        self,
        factory: LayerFactory,
        prefix: str,
        hidden: int,
        sizes: ScanSizes,
        norm_eps: float,
        index: int,
        share: float,
    ) -> None:
        super().__init__()
        context, inner = factory.context, sizes.inner
        self.prefix, self.sizes, self.place = prefix, sizes, context.state_place(index)
        self.qkv_proj = factory.linear({f"{prefix}.qkv_proj": 3 * inner}, hidden, False)
        self.output_gate = factory.linear({f"{prefix}.output_gate": inner}, hidden, False)
        self.out_proj = factory.linear({f"{prefix}.out_proj": hidden}, inner, False)
        self.norm = RMSNorm(context, inner, norm_eps, with_residual=False)
        self.decay: Tensor
        exponents = torch.arange(1, sizes.heads + 1, device=context.device)
        self.register_buffer("decay", -((2 ** (-8 / sizes.heads)) ** exponents) * share, persistent=False)
        self._scan: Callable[..., Any] = context.ops.bind("state_space_scan", OpArgs(context.dtype, sizes.op_sizes))

    def forward(self, x: Tensor, states_of: StatesOf) -> Tensor:
        sizes, states = self.sizes, states_of(*self.place)
        qkv = F.silu(self.qkv_proj.kernel(x)).reshape(-1, sizes.heads, 3 * sizes.head_dim)
        q, k, v = qkv.chunk(3, -1)
        state, decay = states.tensors[STATE], self.decay.expand(len(x), -1)
        out, new = self._scan(v, k, q, decay, None, state, states.slots, states.lens)
        state.index_copy_(0, states.slots, new.to(state.dtype))
        normed = self.norm.forward(out.flatten(1).to(x.dtype))
        return self.out_proj.kernel(self.output_gate.kernel(x).sigmoid() * normed)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv_proj, self.output_gate, self.out_proj

    def weight_views(self) -> dict[str, Tensor]:
        return self.norm.weight_views(f"{self.prefix}.norm")
