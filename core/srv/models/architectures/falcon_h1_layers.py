"""The layers of Falcon-H1.

─┬─ norm ─┬─ Mamba-2 ───(+)─(+)─┬─ norm ─ MLP ─(+)─ …
 │        └─ attention ──┘   │  │               │
 └────────── residual ───────┘  └── residual ───┘
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.mamba_config import LayerFactors, MambaConfig
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm
from srv.models.layers.state_space import StateSpace


class ScaledMLP(GatedMLP):
    """An MLP whose gate, before its activation, and whose result are multiplied by constants."""

    def __init__(
        self, factory: LayerFactory, prefix: str, hidden: int, inner: int, bias: bool, gate: float, out: float
    ) -> None:
        super().__init__(factory, prefix, hidden, inner, bias)
        self.out_factor = out
        self.factors: Tensor
        factors = torch.tensor((gate, 1.0), device=factory.context.device).repeat_interleave(inner)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = (self.gate_up_proj.kernel(x) * self.factors).to(x.dtype)
        return self.down_proj.kernel(self._activate(gate_up)) * self.out_factor


class FalconH1Layer(HybridLayer):
    """One layer."""

    mixer: Attention
    beside: StateSpace
    mixer_name = "self_attn"

    def __init__(self, config: MambaConfig, factors: LayerFactors, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix, self.factors = f"model.layers.{index}", factors
        self.attention_norm = RMSNorm(context, hidden, eps)
        name = f"{self.prefix}.mamba"
        self.beside = StateSpace(factory, name, hidden, config.mamba, eps, index, factors.projected)
        self.mixer = Attention(sizes, factory, f"{self.prefix}.self_attn", index)
        self.mlp_norm = RMSNorm(context, hidden, eps)
        inner, bias, name = sizes.intermediate_size, sizes.mlp_bias, f"{self.prefix}.mlp"
        self.feed_forward = ScaledMLP(factory, name, hidden, inner, bias, factors.gate, factors.mlp_out)

    def mix(self, x: Tensor, inputs: ModelInputs, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        factors = self.factors
        recurrent = self.beside.forward(x * factors.mamba_in, context.states) * factors.mamba_out
        attended = self.mixer.forward(x * factors.attention_in, inputs.positions, cos_sin, context)
        return recurrent + attended * factors.attention_out

    def weight_views(self) -> dict[str, Tensor]:
        views = super().weight_views() | self.beside.weight_views()
        for part in self.beside.projections:
            views |= part.weight_views()
        return views


class FalconH1(HybridStack[FalconH1Layer]):
    """A whole model."""

    def __init__(self, config: MambaConfig, factory: LayerFactory, context_length: int) -> None:
        factors = config.factors or LayerFactors()
        super().__init__(
            config.decoder, factory, context_length, lambda index: FalconH1Layer(config, factors, factory, index)
        )
