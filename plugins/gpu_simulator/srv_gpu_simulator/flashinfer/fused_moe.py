"""flashinfer.fused_moe: a mixture of experts in one call, with unquantized weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.checks import HALVES, Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.expert_products import check_choice, check_weights, mix

MODULES = ("sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")  # that FlashInfer has kernels for
_VECTOR_BYTES = 16


class FusedMoe:
    """The module `flashinfer.fused_moe`, for one simulated GPU."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def cutlass_fused_moe(
        self,
        input: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        fc1_expert_weights: Tensor,
        fc2_expert_weights: Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[Tensor],
        fc1_expert_biases: Tensor | None = None,
        fc2_expert_biases: Tensor | None = None,
        input_sf: Tensor | None = None,
        swiglu_alpha: Tensor | None = None,
        swiglu_beta: Tensor | None = None,
        swiglu_limit: Tensor | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        cluster_size: int = 1,
        cluster_rank: int = 0,
        output: Tensor | None = None,
        enable_alltoall: bool = False,
        use_deepseek_fp8_block_scale: bool = False,
        use_w4_group_scaling: bool = False,
        use_mxfp8_act_scaling: bool = False,
        min_latency_mode: bool = False,
        use_packed_weights: bool = False,
        tune_max_num_tokens: int = 8192,
        enable_pdl: bool | None = None,
        activation_type: Any = None,
    ) -> list[Tensor]:
        """[output [T, H]]. fc1_expert_weights: [E, 2 I, H], the rows of `up` before those of the gate.

        With swiglu_alpha, _beta and _limit, float32 [E]: the gate is at most the limit, `up` within it, and the result
        is gate * sigmoid(alpha * gate) * (up + beta).
        """
        rules = Rules("cutlass_fused_moe")
        card = self._accelerator.card.key
        rules.require(card in MODULES, "device", card, f"kernels are for {', '.join(MODULES)}")
        absent: dict[str, Any] = {
            "input_sf": input_sf is not None, "quant_scales": quant_scales, "enable_alltoall": enable_alltoall,
            "activation_type": activation_type is not None, "min_latency_mode": min_latency_mode,
            "use_deepseek_fp8_block_scale": use_deepseek_fp8_block_scale, "use_packed_weights": use_packed_weights,
            "use_w4_group_scaling": use_w4_group_scaling, "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        }  # fmt: skip
        for name, argument in absent.items():
            rules.require(not argument, name, "given", "but is not simulated: leave it out", NotImplementedError)
        for name, size in (("tp_size", tp_size), ("ep_size", ep_size), ("cluster_size", cluster_size)):
            rules.require(size == 1, name, size, "only 1 is simulated", NotImplementedError)
        choice = {"token_selected_experts": token_selected_experts, "token_final_scales": token_final_scales}
        weights = {"fc1_expert_weights": fc1_expert_weights, "fc2_expert_weights": fc2_expert_weights}
        rules.on_device(input=input, **choice, **weights)
        rules.dtype("input", input.dtype, HALVES)
        rules.dtype("output_dtype", output_dtype, (input.dtype,))
        rules.require(input.is_contiguous(), "input", f"of strides {input.stride()}", "must be contiguous")
        check_weights(rules, input, *weights.values(), ("input", *weights))
        experts, hidden, intermediate = fc2_expert_weights.shape
        vector = _VECTOR_BYTES // input.element_size()
        for name, size in (("hidden size", hidden), ("inter size", intermediate)):
            rules.require(size % vector == 0, name, size, f"must be a multiple of {vector}", RuntimeError)
        check_choice(rules, input.shape[0], *choice.values(), tuple(choice))
        swiglu = {"swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta, "swiglu_limit": swiglu_limit}
        factors = [factor for factor in swiglu.values() if factor is not None]
        rules.require(len(factors) in (0, 3), "swiglu_alpha", "given alone", "only all three are simulated")
        if output is None:
            output = torch.empty((input.shape[0], hidden), dtype=output_dtype, device=input.device)
        shapes: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
            ("fc1_expert_biases", fc1_expert_biases, input.dtype, (experts, 2 * intermediate)),
            ("fc2_expert_biases", fc2_expert_biases, input.dtype, (experts, hidden)),
            ("output", output, output_dtype, (input.shape[0], hidden)),
            *((name, factor, torch.float32, (experts,)) for name, factor in swiglu.items()),
        ]
        for name, tensor, dtype, shape in shapes:
            if tensor is not None:
                rules.on_device(**{name: tensor})
                rules.dtype(name, tensor.dtype, (dtype,))
                rules.shape(name, tensor, shape)
        biases = fc1_expert_biases, fc2_expert_biases
        operands = input, *choice.values(), *weights.values(), biases, factors
        self._accelerator.launch("flashinfer.cutlass_fused_moe", _mix, output, *operands)
        return [output]


def _mix(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    swiglu: list[Tensor],
) -> None:
    def activation(up_gate: Tensor, expert: int) -> Tensor:
        up, gate = up_gate.chunk(2, -1)
        if not swiglu:
            return torch.nn.functional.silu(gate) * up
        alpha, beta, limit = (float(values[expert]) for values in swiglu)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + beta)

    mix("cutlass_fused_moe", out, x, ids, weights, first, second, biases, activation)
