"""Mixtures of experts by the vendors' libraries: FlashInfer's for NVIDIA GPUs, aiter's for AMD's.

    FlashInferExperts   flashinfer.fused_moe.cutlass_fused_moe, which reads the rows of `up` before those of the gate
    AiterExperts        aiter.fused_moe.fused_moe, which reads blocks that aiter.ops.shuffle has arranged

A library's layout is made once, when a model has been loaded (`prepare`), and takes the place of the weights that were
loaded. Until then, and as an op of its own, every call makes it. The backends in `srv_gpu.expert_specs` refuse models
that need what a library does not compute, such as another activation; an op of its own passes that to Triton's kernel.

Ids outside [0, E), which the libraries do not take, become expert 0 with a weight of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from srv.models.layers.op_layer import OpLayer
from srv_gpu.accelerator import Accelerator
from srv_gpu.expert_specs import BLOCK, VECTOR

_ALPHA, _BETA, _LIMIT = 1.702, 1.0, 7.0  # of "swiglu_clamped"


class FlashInferExperts:
    """The op `experts` by FlashInfer; the first call imports it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        """See `srv_kernels.contracts`; rearranges gate_up at every call."""
        if not self.computes(down, activation):
            return _by_triton(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation)
        biases = (None if gate_up_bias is None else _up_first(gate_up_bias), down_bias)
        swiglu = _swiglu(gate_up, activation)
        return self._mix(x, ids, weights, up_gate=_up_first(gate_up), down=down, biases=biases, swiglu=swiglu)

    def computes(self, down: Tensor, activation: str) -> bool:
        """Whether the library computes such experts, whose down is [E, H, I]."""
        return activation in ("silu", "swiglu_clamped") and all(size % VECTOR == 0 for size in down.shape[1:])

    def prepare(self, layer: OpLayer) -> None:
        """Give a layer of experts the kernel, with its weights as that reads them."""
        (operands,) = layer.operands()
        biases = operands["gate_up_bias"], operands["down_bias"]
        activation = operands["activation"]
        if not self.computes(operands["down"], activation):
            return
        up_gate, down = _up_first(operands["gate_up"].data), operands["down"].data
        swiglu = _swiglu(up_gate, activation)
        first_bias = None if biases[0] is None else _up_first(biases[0])
        layer.release()
        layer.kernel = partial(self._mix, up_gate=up_gate, down=down, biases=(first_bias, biases[1]), swiglu=swiglu)

    def _mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        up_gate: Tensor,
        down: Tensor,
        biases: tuple[Tensor | None, Tensor | None],
        swiglu: Mapping[str, Tensor],
    ) -> Tensor:
        """up_gate [E, 2 I, H]: the rows of `up`, then those of the gate."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0] == 0:
            return out
        chosen, factors = _known(ids, weights, up_gate.shape[0])
        self._accelerator.library("flashinfer.fused_moe").cutlass_fused_moe(
            x.contiguous(),
            chosen,
            factors,
            up_gate,
            down.contiguous(),
            x.dtype,
            [],
            fc1_expert_biases=biases[0],
            fc2_expert_biases=biases[1],
            output=out,
            **swiglu,
        )
        return out


class AiterExperts:
    """The op `experts` by aiter; the first call imports it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        """See `srv_kernels.contracts`; rearranges the weights at every call."""
        biased = gate_up_bias is not None or down_bias is not None
        if not self.computes(down, activation, biased=biased):
            return _by_triton(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation)
        return self._mix(x, ids, weights, first=self._arranged(gate_up), second=self._arranged(down))

    def computes(self, down: Tensor, activation: str, *, biased: bool) -> bool:
        """Whether the library computes such experts, whose down is [E, H, I]."""
        return activation == "silu" and not biased and all(size % BLOCK == 0 for size in down.shape[1:])

    def prepare(self, layer: OpLayer) -> None:
        """Give a layer of experts the kernel, with its weights as that reads them."""
        (operands,) = layer.operands()
        biased = operands["gate_up_bias"] is not None or operands["down_bias"] is not None
        if not self.computes(operands["down"], operands["activation"], biased=biased):
            return
        first, second = (self._arranged(operands[name].data) for name in ("gate_up", "down"))
        layer.release()
        layer.kernel = partial(self._mix, first=first, second=second)

    def _arranged(self, weight: Tensor) -> Tensor:
        arranged: Tensor = self._accelerator.library("aiter.ops.shuffle").shuffle_weight(weight, layout=(16, 16))
        return arranged

    def _mix(self, x: Tensor, ids: Tensor, weights: Tensor, *, first: Tensor, second: Tensor) -> Tensor:
        """first, second: gate_up and down as `_arranged` returns them."""
        if x.shape[0] == 0:
            return torch.empty_like(x)
        library = self._accelerator.library("aiter")
        chosen, factors = _known(ids, weights, first.shape[0])
        out: Tensor = self._accelerator.library("aiter.fused_moe").fused_moe(
            x.contiguous(),
            first,
            second,
            factors,
            chosen,
            activation=library.ActivationType.Silu,
            quant_type=library.QuantType.No,
        )
        return out


def _up_first(gate_up: Tensor) -> Tensor:
    """[E, 2 I, ...]: the second half along axis 1, then the first."""
    gate, up = gate_up.chunk(2, 1)
    return torch.cat((up, gate), 1)


def _swiglu(gate_up: Tensor, activation: str) -> dict[str, Tensor]:
    """The library's arguments for an activation: numbers for each expert."""
    numbers = {"swiglu_alpha": _ALPHA, "swiglu_beta": _BETA, "swiglu_limit": _LIMIT}
    factors = numbers.items() if activation == "swiglu_clamped" else ()
    return {name: torch.full((gate_up.shape[0],), value, device=gate_up.device) for name, value in factors}


def _known(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(ids int32, weights), with unknown ids as expert 0 of weight 0."""
    is_local = (ids >= 0) & (ids < experts)
    return torch.where(is_local, ids, 0).int(), torch.where(is_local, weights, 0.0)


def _by_triton(*arguments: Any) -> Tensor:
    out: Tensor = torch.ops.srv_triton.experts(*arguments)
    return out
