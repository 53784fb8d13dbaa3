"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from srv.models.layers.factory import LayerFactory


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, Shazeer 2020, arXiv:2002.05202); gate and up are fused into one matrix.

    Sharded over ranks by the intermediate size: the result is then this rank's partial sum.
    """

    def __init__(self, factory: LayerFactory, prefix: str, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        gate_up = {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}
        self.gate_up_proj = factory.linear(gate_up, hidden, bias, split="out")
        self.down_proj = factory.linear({f"{prefix}.down_proj": hidden}, intermediate, bias, split="in")
        local = sum(self.gate_up_proj.output_sizes.values()) // 2
        self._silu_and_mul = factory.context.bind("silu_and_mul", dim=local)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.kernel(self._silu_and_mul(self.gate_up_proj.kernel(x)))
