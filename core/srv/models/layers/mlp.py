"""The feed-forward layers, with and without a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.op_layer import TORCH
from srv.platform.interface import OpArgs

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
PlainActivation: TypeAlias = Literal["gelu", "gelu_tanh", "relu"]


class PlainMLP(nn.Module):
    """down(activation(up(x))), with GELU, its tanh approximation, or ReLU. Sharded over ranks as `GatedMLP` is."""

    def __init__(
        self,
        factory: LayerFactory,
        prefix: str,
        hidden: int,
        intermediate: int,
        bias: bool,
        activation: PlainActivation,
    ) -> None:
        super().__init__()
        self.up_proj = factory.linear({f"{prefix}.up_proj": intermediate}, hidden, bias, split="out")
        self.down_proj = factory.linear({f"{prefix}.down_proj": hidden}, intermediate, bias, split="in")
        self._activate = _ACTIVATIONS[activation]
        local = sum(self.up_proj.output_sizes.values())
        factory.context.ops.note_own(activation, OpArgs(factory.context.dtype, {"dim": local}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.kernel(self._activate(self.up_proj.kernel(x)))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The layers with weights."""
        return self.up_proj, self.down_proj


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202); gate and up are fused into one matrix.

    `activation`: SiLU (SwiGLU), or the tanh approximation of GELU (GEGLU), for which a platform may have an op.
    Sharded over ranks by the intermediate size: the result is then this rank's partial sum.
    """

    def __init__(
        self,
        factory: LayerFactory,
        prefix: str,
        hidden: int,
        intermediate: int,
        bias: bool,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        gate_up = {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}
        self.gate_up_proj = factory.linear(gate_up, hidden, bias, split="out")
        self.down_proj = factory.linear({f"{prefix}.down_proj": hidden}, intermediate, bias, split="in")
        local = sum(self.gate_up_proj.output_sizes.values()) // 2
        args = OpArgs(factory.context.dtype, {"dim": local})
        if activation == "silu":
            self._activate = factory.context.bind("silu_and_mul", dim=local)
        elif factory.context.ops.offers("gelu_tanh_and_mul", args):
            self._activate = factory.context.bind("gelu_tanh_and_mul", dim=local)
        else:
            self._activate = gelu_tanh_and_mul
            factory.context.ops.note_own("gelu_tanh_and_mul", args, TORCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.kernel(self._activate(self.gate_up_proj.kernel(x)))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The layers with weights."""
        return self.gate_up_proj, self.down_proj


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: GELU (its tanh approximation) of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


_ACTIVATIONS: Mapping[PlainActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
)
