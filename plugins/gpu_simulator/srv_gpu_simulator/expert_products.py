"""The mathematics that the stand-ins for MoE kernels have in common, in float32 on host views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from srv_gpu_simulator.checks import Rules


def silu(gate_up: Tensor) -> Tensor:
    """[n, 2 I], the gate first -> [n, I]."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def check_weights(rules: Rules, x: Tensor, first: Tensor, second: Tensor, names: tuple[str, str, str]) -> None:
    """Refuse weights that are not [E, 2 I, H] and [E, H, I] of x's dtype, contiguous. names: of x and the weights."""
    rules.dims(names[0], x, 2)
    for name, weight in zip(names[1:], (first, second), strict=True):
        rules.dims(name, weight, 3)
        rules.dtype(name, weight.dtype, (x.dtype,))
        rules.require(weight.is_contiguous(), name, f"of strides {weight.stride()}", "must be contiguous")
    experts, hidden, intermediate = second.shape
    rules.shape(names[1], first, (experts, 2 * intermediate, hidden))
    rules.shape(names[0], x, (x.shape[0], hidden))


def check_choice(rules: Rules, tokens: int, ids: Tensor, weights: Tensor, names: tuple[str, str]) -> None:
    """Refuse ids that are not int32 [T, K], contiguous, and weights that are not float32 of the same shape."""
    rules.dims(names[0], ids, 2)
    rules.dtype(names[0], ids.dtype, (torch.int32,))
    rules.require(ids.is_contiguous(), names[0], f"of strides {ids.stride()}", "must be contiguous")
    rules.require(ids.shape[0] == tokens, names[0], f"of {ids.shape[0]} rows", f"must have the {tokens} rows of tokens")
    rules.dtype(names[1], weights.dtype, (torch.float32,))
    rules.shape(names[1], weights, ids.shape)


def mix(
    function: str,
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: Callable[[Tensor, int], Tensor],
) -> None:
    """Write the weighted sum of each token's experts. activation: of the rows of an expert, given its id."""
    chosen = ids.long()
    if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= len(first)):
        raise RuntimeError(f"{function}: an id is not 0 to {len(first) - 1}, and would read the memory of no expert")
    total = torch.zeros(out.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        product = x[tokens].float() @ first[expert].float().T
        if biases[0] is not None:
            product = product + biases[0][expert].float()
        hidden = activation(product, expert).to(x.dtype).float()
        result = hidden @ second[expert].float().T
        if biases[1] is not None:
            result = result + biases[1][expert].float()
        total.index_add_(0, tokens, result * weights[tokens, ranks, None])
    out.copy_(total.to(out.dtype))
