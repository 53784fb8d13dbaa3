"""Mixtures of experts of FlashInfer and aiter: values against float64, captures, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from srv_gpu_simulator.aiter import Aiter
from srv_gpu_simulator.cards import find_card
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.flashinfer import FlashInfer

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 5, 4, 2, 32, 32


@pytest.fixture(scope="module")
def aiter(gpu: Any) -> Any:
    """aiter on this process's GPU: its mixture of experts does not depend on the architecture."""
    return None if gpu is None else Aiter(gpu.accelerator)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ids() -> Tensor:
    """Nobody chooses expert 1."""
    return torch.tensor([[3, 0], [0, 2], [3, 2], [2, 3], [0, 3]], dtype=torch.int32)


X, FIRST, SECOND = (
    random(1, TOKENS, HIDDEN),
    random(2, EXPERTS, 2 * INNER, HIDDEN) / 6,
    random(3, EXPERTS, HIDDEN, INNER),
)
WEIGHTS = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(4))


def expected(
    chosen: Tensor, activation: Callable[[Tensor, Tensor], Tensor], *, up_first: bool, biases: tuple[Tensor, ...] = ()
) -> Tensor:
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token, row in enumerate(chosen.tolist()):
        for rank, expert in enumerate(row):
            product = FIRST[expert].double() @ X[token].double()
            product = product + biases[0][expert].double() if biases else product
            halves = product.chunk(2)
            gate, up = (halves[1], halves[0]) if up_first else halves
            result = SECOND[expert].double() @ activation(gate, up)
            result = result + biases[1][expert].double() if biases else result
            out[token] += WEIGHTS[token, rank].double() * result
    return out


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return gate * (1.5 * gate).sigmoid() * (up + 2)


def close(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


def cutlass(**changed: Any) -> dict[str, Any]:
    arguments = {
        "input": X,
        "token_selected_experts": ids(),
        "token_final_scales": WEIGHTS,
        "fc1_expert_weights": FIRST,
        "fc2_expert_weights": SECOND,
    }
    moved = {name: value.to("gpusim") for name, value in arguments.items()}
    return {**moved, "output_dtype": torch.bfloat16, "quant_scales": [], **changed}


def test_flashinfer_reads_up_before_the_gate(gpu: Any) -> None:
    out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="gpusim")
    gpu.flashinfer.fused_moe.cutlass_fused_moe(**cutlass(output=out))
    close(out, expected(ids(), silu, up_first=True))


def test_flashinfer_clamps_and_adds_biases(gpu: Any) -> None:
    biases = random(5, EXPERTS, 2 * INNER), random(6, EXPERTS, HIDDEN)
    numbers = {"swiglu_alpha": 1.5, "swiglu_beta": 2.0, "swiglu_limit": 0.5}
    vectors = {name: torch.full((EXPERTS,), value, device="gpusim") for name, value in numbers.items()}
    moved = {f"fc{index + 1}_expert_biases": bias.to("gpusim") for index, bias in enumerate(biases)}
    (out,) = gpu.flashinfer.fused_moe.cutlass_fused_moe(**cutlass(**vectors, **moved))
    close(out, expected(ids(), clamped, up_first=True, biases=biases))


def test_a_capture_of_flashinfer_follows_other_ids(gpu: Any) -> None:
    arguments = cutlass(output=torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="gpusim"))
    graph = gpu.accelerator.CUDAGraph()
    with gpu.accelerator.graph(graph):
        gpu.flashinfer.fused_moe.cutlass_fused_moe(**arguments)
    other = torch.tensor([[1, 0]] * TOKENS, dtype=torch.int32)
    for chosen in (ids(), other):
        arguments["token_selected_experts"].copy_(chosen)
        graph.replay()
        close(arguments["output"], expected(chosen, silu, up_first=True))


def test_flashinfer_refuses(gpu: Any) -> None:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("gpusim")

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input": moved(X.float())}, ValueError, "input: is torch.float32, must be float16 or bfloat16"),
        ({"input": X}, ValueError, "input: is on cpu, must be on the GPU"),
        ({"token_selected_experts": moved(ids().long())}, ValueError, "token_selected_experts: is torch.int64"),
        ({"token_final_scales": moved(WEIGHTS.half())}, ValueError, "token_final_scales: is torch.float16"),
        ({"fc1_expert_weights": moved(FIRST[:, :-2].contiguous())}, ValueError, r"fc1_.* \(4, 62, 32\), must have"),
        ({"output_dtype": torch.float16}, ValueError, "output_dtype: is torch.float16, must be bfloat16"),
        ({"fc1_expert_biases": moved(random(5, EXPERTS, 3))}, ValueError, r"fc1_.*biases: is of shape \(4, 3\)"),
        ({"swiglu_limit": moved(torch.ones(EXPERTS))}, ValueError, "swiglu_alpha: is given alone"),
        ({"min_latency_mode": True}, NotImplementedError, "min_latency_mode: is given, but is not simulated"),
        ({"tp_size": 2}, NotImplementedError, "tp_size: is 2, only 1 is simulated"),
    ]
    for changed, error, refusal in cases:
        with pytest.raises(error, match=f"^cutlass_fused_moe: {refusal}"):
            gpu.flashinfer.fused_moe.cutlass_fused_moe(**cutlass(**changed))
    with pytest.raises(RuntimeError, match="an id is not 0 to 3"):
        gpu.flashinfer.fused_moe.cutlass_fused_moe(**cutlass(token_selected_experts=moved(ids() + 1)))


def test_flashinfer_s_kernels_read_vectors_and_are_for_newer_gpus(gpu: Any) -> None:
    odd = {
        "input": random(7, TOKENS, 12).to("gpusim"),
        "fc1_expert_weights": random(8, EXPERTS, 64, 12).to("gpusim"),
        "fc2_expert_weights": random(9, EXPERTS, 12, 32).to("gpusim"),
    }
    with pytest.raises(RuntimeError, match="hidden size: is 12, must be a multiple of 8"):
        gpu.flashinfer.fused_moe.cutlass_fused_moe(**cutlass(**odd))
    older = cast(Accelerator, SimpleNamespace(card=find_card("sm86"), launch=None))
    with pytest.raises(ValueError, match="device: is sm86, kernels are for sm89, sm90"):
        FlashInfer(older).fused_moe.cutlass_fused_moe(**cutlass())


def mixed(aiter: Any, **changed: Any) -> dict[str, Any]:
    shuffle = aiter.ops.shuffle.shuffle_weight
    arguments = {
        "hidden_states": X.to("gpusim"),
        "w1": shuffle(FIRST.to("gpusim"), layout=(16, 16)),
        "w2": shuffle(SECOND.to("gpusim"), layout=(16, 16)),
        "topk_weight": WEIGHTS.to("gpusim"),
        "topk_ids": ids().to("gpusim"),
    }
    return {**arguments, **changed}


def test_aiter_reads_shuffled_weights(aiter: Any) -> None:
    out = aiter.fused_moe.fused_moe(**mixed(aiter), activation=aiter.ActivationType.Silu, quant_type=aiter.QuantType.No)
    close(out, expected(ids(), silu, up_first=False))


def test_shuffling_moves_every_element_within_its_matrix(aiter: Any) -> None:
    numbers = torch.arange(2 * 32 * 64, dtype=torch.int16).view(2, 32, 64)
    shuffled = aiter.ops.shuffle.shuffle_weight(numbers)
    assert not torch.equal(shuffled, numbers)
    for matrix, moved in zip(numbers, shuffled, strict=True):
        assert torch.equal(moved.flatten().sort().values, matrix.flatten())
    assert shuffled.flatten()[:16].tolist() == [*range(8), *range(64, 72)]  # vectors of the first two rows
    with pytest.raises(AssertionError, match="x: is of 8, must be a multiple of 16"):
        aiter.ops.shuffle.shuffle_weight(numbers[:, :8])


def test_aiter_refuses(aiter: Any) -> None:
    for changed, error, refusal in (
        ({"w1": FIRST.to("gpusim")}, ValueError, "w1: is not shuffled"),
        ({"hidden_states": X.float().to("gpusim")}, ValueError, "hidden_states: is torch.float32"),
        ({"topk_ids": ids().long().to("gpusim")}, ValueError, "topk_ids: is torch.int64, must be int32"),
        ({"activation": aiter.ActivationType.Gelu}, NotImplementedError, "activation: .*Gelu.*, is not simulated"),
        ({"bias1": X.to("gpusim")}, NotImplementedError, "bias1: is given, but is not simulated"),
        ({"quant_type": aiter.QuantType.per_Token}, NotImplementedError, "quant_type: .*per_Token.*, is not simulated"),
    ):
        with pytest.raises(error, match=f"^fused_moe: {refusal}"):
            aiter.fused_moe.fused_moe(**mixed(aiter, **changed))
