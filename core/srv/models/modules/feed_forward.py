"""The feed-forward parts of layers: MLPs, and mixtures of experts.

    x ─┬─ router ─ logits ─ route_experts ─ ids, weights ─┐
       ├─ [to their hidden size] ──────────────────── experts ─ [back] ─(+)─
       └─ shared expert ───────────────────────── [· sigmoid(its gate)] ─┘

Owns the order of computation. Must not know how weights are stored, nor how experts are computed. Sharded over ranks,
by the intermediate size, results are partial sums.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models import blueprint
from srv.models.blueprint import GATED, Activation
from srv.models.layers.experts import ExpertSizes
from srv.models.layers.linear import Projection
from srv.models.layers.moe_config import SPARSE_MIXER
from srv.models.layers.op_layer import TORCH
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.place import Place
from srv.models.modules.routing import sparse_mixer
from srv.platform.interface import OpArgs

# By activations for which platforms may have ops, of [..., 2 I] for [..., I]: the first half is the gate.
_OPS: Mapping[Activation, str] = MappingProxyType({"silu_gated": blueprint.SILU, "gelu_tanh_gated": blueprint.GELU})


class MLP(nn.Module):
    """down(activation(up(x))); with a gate (Shazeer 2020, arXiv:2002.05202), down(activation(gate(x)) · up(x)).

    The gate and `up` are fused into one matrix. GELU is exact, or its approximation by tanh.
    """

    def __init__(self, part: blueprint.MLP, place: Place) -> None:
        super().__init__()
        up, self.gated = place.linear(part.up), part.activation in GATED
        if self.gated:
            self.gate_up_proj = up
        else:
            self.up_proj = up
        self.down_proj = place.linear(part.down)
        outputs = sum(up.output_sizes.values())
        ops, op = place.context.ops, _OPS.get(part.activation, part.activation.removesuffix("_gated"))
        self.inner = outputs // 2 if self.gated else outputs  # on this rank
        args = OpArgs(place.context.dtype, {"dim": self.inner})
        if op == blueprint.SILU or (op == blueprint.GELU and ops.offers(op, args)):
            self._activate: Callable[[Tensor], Tensor] = ops.bind(op, args)
        else:
            self._activate = self.own_activation(part, place)
            ops.note_own(op, args, TORCH)

    def own_activation(self, part: blueprint.MLP, place: Place) -> Callable[[Tensor], Tensor]:
        """The activation where no op computes it."""
        return ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        up = self.gate_up_proj if self.gated else self.up_proj
        return self.down_proj.kernel(self._activate(up.kernel(x)))


class ScaledMLP(MLP):
    """An MLP whose gate, before its activation, and whose result are multiplied by constants (Falcon-H1)."""

    def __init__(self, part: blueprint.MLP, place: Place) -> None:
        super().__init__(part, place)
        self.factor = part.factor
        self.factors: Tensor
        factors = torch.tensor((part.gate_factor, 1.0), device=place.context.device).repeat_interleave(self.inner)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        up = (self.gate_up_proj.kernel(x) * self.factors).to(x.dtype)
        return self.down_proj.kernel(self._activate(up)) * self.factor


class XIELU(WeightModule):
    """An activation with two learned slopes, for positive and negative inputs (Huang et al. 2024, arXiv:2411.13010).

    Its two constants, beta and eps, are stored with them.
    """

    def __init__(self, part: blueprint.Tensors, place: Place) -> None:
        super().__init__()
        self.prefix = place.within(part).prefix
        self.values = {name: place.context.empty(*shape) for name, shape in part.shapes.items()}
        self.positive, self.negative, self.beta, self.eps = self.values.values()

    def forward(self, x: Tensor) -> Tensor:
        above, below = F.softplus(self.positive) * x * x, torch.expm1(torch.minimum(x, self.eps)) - x
        return torch.where(x > 0, above, below * (self.beta + F.softplus(self.negative))) + self.beta * x

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.prefix}.{name}": value for name, value in self.values.items()}


class LearnedMLP(MLP):
    """An MLP whose activation has parameters, of which each rank has all (Apertus)."""

    def own_activation(self, part: blueprint.MLP, place: Place) -> Callable[[Tensor], Tensor]:
        assert isinstance(part, blueprint.LearnedMLP)
        self.act_fn = XIELU(part.learned, place)
        return self.act_fn.forward


class SparseMLP(MLP):
    """An MLP whose gate is what its values are more than a quantile of all of a token, and 0 elsewhere (Gemma 3n).

    Mean and standard deviation are those of all ranks together, in float32.
    """

    def __init__(self, part: blueprint.MLP, place: Place) -> None:
        super().__init__(part, place)
        self.deviations = statistics.NormalDist().inv_cdf(part.sparsity)
        self._ranks, self._communicator = place.context.group.size, place.context.communicator

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.kernel(x).chunk(2, -1)
        wide = gate.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square()).sqrt()
        sparse = F.relu(wide - (mean + deviation * self.deviations)).to(x.dtype)
        return self.down_proj.kernel(self._activate(torch.cat((sparse, up), -1)))

    def _mean(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return mean if self._communicator is None else self._communicator.all_reduce(mean) / self._ranks


class ChoiceBias(WeightModule):
    """What is added to the scores of experts for the choice: float32 [E], which ERNIE stores as [1, E]."""

    def __init__(self, part: blueprint.Tensors, place: Place) -> None:
        super().__init__()
        ((name, shape),) = part.shapes.items()
        self.name, self._shape = place.name(name), shape
        self.values = place.context.empty(shape[-1], dtype=torch.float32)

    def weight_views(self) -> dict[str, Tensor]:
        return {self.name: self.values.view(self._shape)}


class MoE(nn.Module):
    """The feed-forward part of a mixture of experts: [T, H] -> [T, H].

    The router computes in the model's dtype, and its logits are not rounded to that where a kernel can return the
    float32 sums.

    `observe`: called with the chosen experts, int64 [T, K], in steps that run eagerly; None if nobody counts them.
    """

    observe: Callable[[Tensor], None] | None = None

    def __init__(self, part: blueprint.MoE, place: Place) -> None:
        super().__init__()
        context, experts = place.context, part.experts
        self.router = place.linear(part.router)
        self.router.keep_float32(context)
        self.choice_bias = None if part.choice_bias is None else ChoiceBias(part.choice_bias, place)
        sizes = ExpertSizes(experts.count, experts.used, experts.hidden, experts.inner, experts.activation)
        self.experts = place.factory.experts(place.within(experts).prefix, sizes, experts.bias)
        self.to_experts = None if part.to_experts is None else place.linear(part.to_experts)
        self.from_experts = None if part.from_experts is None else place.linear(part.from_experts)
        self._route: Callable[..., Any] = sparse_mixer
        if part.routing.scoring == SPARSE_MIXER:
            context.ops.note_own(SPARSE_MIXER, OpArgs(context.dtype, {"dim": experts.count}), TORCH)
        else:
            self._route = context.bind(blueprint.ROUTE, experts=experts.count, top_k=experts.used)
        self._routing = part.routing[:-1]
        self._scales_inputs = part.scales_inputs
        self._logits_soft_cap, self._factor = part.logits_soft_cap, part.factor
        self.shared = None if part.shared is None else MLP(part.shared, place.within(part.shared))
        self.shared_gate: Projection | None = None if part.shared_gate is None else place.linear(part.shared_gate)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.choice_bias is None else self.choice_bias.values
        logits = self.router.kernel(x).float()
        if self._logits_soft_cap is not None:
            logits = torch.tanh(logits / self._logits_soft_cap) * self._logits_soft_cap
        ids, weights = self._route(logits, bias, *self._routing)
        if self.observe is not None:
            self.observe(ids)
        ids = self.of_rank(ids)
        rows = x if self.to_experts is None else self.to_experts.kernel(x)
        compute = self._scaled_inputs if self._scales_inputs else self.experts.kernel
        out = compute(rows, ids, weights)
        if self.from_experts is not None:
            out = self.from_experts.kernel(out)
        if self.shared is not None:
            shared = self.shared.forward(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate.kernel(x).sigmoid()
            out = out + shared
        return out if self._factor == 1.0 else out * self._factor

    def of_rank(self, ids: Tensor) -> Tensor:
        """Numbers of experts, counted from this rank's first one; those of other ranks' experts are out of range."""
        first = self.experts.sizes.offset
        return ids if first == 0 else ids - first

    def _scaled_inputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over a token's experts of what each makes of x times its weight: a row for each of them."""
        rows = (x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(-1)).flatten(0, 1)
        out = self.experts.kernel(rows, ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        return out.view(*ids.shape, -1).sum(1)


def feed_forward(part: blueprint.MLP | blueprint.MoE, place: Place) -> MLP | MoE:
    if isinstance(part, blueprint.MoE):
        return MoE(part, place)
    if isinstance(part, blueprint.LearnedMLP):
        return LearnedMLP(part, place)
    if part.sparsity:
        return SparseMLP(part, place)
    is_scaled = (part.gate_factor, part.factor) != (1.0, 1.0)
    return ScaledMLP(part, place) if is_scaled else MLP(part, place)


def _of_gate(activate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """x [..., 2 I] -> [..., I]: the activation of the first half times the second."""

    def product(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activate(gate).mul_(up)

    return product


def _squared_relu(x: Tensor) -> Tensor:
    """So et al. 2021, arXiv:2109.08668."""
    return F.relu(x).square_()


_gelu_tanh = partial(F.gelu, approximate="tanh")
# For which layers call torch's own operators.
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "tanh": torch.tanh,
        "gelu": F.gelu,
        "gelu_tanh": _gelu_tanh,
        "relu": F.relu,
        "relu2": _squared_relu,
        "gelu_gated": _of_gate(F.gelu),
        "gelu_tanh_gated": _of_gate(_gelu_tanh),
    }
)
