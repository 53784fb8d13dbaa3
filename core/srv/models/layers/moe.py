"""A mixture of experts: the router, the choice of each token's experts, the experts, and a shared expert.

    x ─┬─ router ─ logits ─ route_experts ─ ids, weights ─┐
       ├───────────────────────────────────────────── experts ─(+)─
       └─ shared expert ──────────────── [· sigmoid(its gate)] ─┘

Owns the order of computation. Must not know how weights are stored, nor how experts are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe_config import ROUTER, MoEConfig


class ChoiceBias(nn.Module):
    """What is added to the scores of experts for the choice: float32 [E]."""

    def __init__(self, context: BuildContext, name: str, experts: int) -> None:
        super().__init__()
        self.name = name
        self.values = context.empty(experts, dtype=torch.float32)

    def weight_views(self) -> dict[str, Tensor]:
        return {self.name: self.values}

    def weight_slices(self) -> dict[str, Slice]:
        return {}


Weighted: TypeAlias = Projection | ExpertWeights | ChoiceBias


class MoE(nn.Module):
    """The feed-forward layer of a mixture of experts: [T, H] -> [T, H]. Sharded over ranks, a partial sum.

    The router computes in the model's dtype, and its logits are not rounded to that where a kernel can return the
    float32 sums.

    `observe`: called with the chosen experts, int64 [T, K], in steps that run eagerly; None if nobody counts them.
    """

    observe: Callable[[Tensor], None] | None = None

    def __init__(self, factory: LayerFactory, prefix: str, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        context, routing = factory.context, config.routing
        self.router = factory.linear({f"{prefix}.{config.router}": config.experts}, hidden, config.router_bias)
        self.router.keep_float32(context)
        self.router.role = ROUTER
        name = f"{prefix}.{config.router}.e_score_correction_bias"
        self.choice_bias = ChoiceBias(context, name, config.experts) if routing.bias else None
        sizes = ExpertSizes(config.experts, routing.top_k, hidden, config.intermediate, config.activation)
        self.experts = factory.experts(f"{prefix}.experts", sizes, config.expert_bias)
        self._route = context.bind("route_experts", experts=config.experts, top_k=routing.top_k)
        self._routing = routing[:-1]
        self._scales_inputs = config.scales_inputs
        self.shared: GatedMLP | None = None
        self.shared_gate: Projection | None = None
        if config.shared_intermediate:
            shared = f"{prefix}.{config.shared}"
            self.shared = GatedMLP(factory, shared, hidden, config.shared_intermediate, bias=False)
            if config.shared_gate:
                self.shared_gate = factory.linear({f"{shared}_gate": 1}, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.choice_bias is None else self.choice_bias.values
        ids, weights = self._route(self.router.kernel(x).float(), bias, *self._routing)
        if self.observe is not None:
            self.observe(ids)
        out = self._scaled_inputs(x, ids, weights) if self._scales_inputs else self.experts.kernel(x, ids, weights)
        if self.shared is None:
            return out
        shared = self.shared.forward(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate.kernel(x).sigmoid()
        return out + shared

    def _scaled_inputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over a token's experts of what each makes of x times its weight: a row for each of them."""
        rows = (x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(-1)).flatten(0, 1)
        out = self.experts.kernel(rows, ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        return out.view(*ids.shape, -1).sum(1)

    @property
    def projections(self) -> tuple[Weighted, ...]:
        """The layers with weights."""
        shared = () if self.shared is None else self.shared.projections
        optional = tuple(each for each in (self.choice_bias, self.shared_gate) if each is not None)
        return self.router, self.experts, *shared, *optional


def feed_forward(
    factory: LayerFactory, prefix: str, hidden: int, intermediate: int, moe: MoEConfig | None, *, bias: bool = False
) -> GatedMLP | MoE:
    """The feed-forward part of a layer: its mixture of experts or, for None, an MLP of `intermediate`."""
    if moe is None:
        return GatedMLP(factory, prefix, hidden, intermediate, bias)
    return MoE(factory, prefix, hidden, moe)
