"""Test cases for the ops of mixtures of experts: ordinary inputs, and those on which implementations often fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from srv_kernels.cases import ALL_INPUTS, Case, fp8_scales, gguf_capability, random_fp8, random_gguf_rows
from srv_kernels.expert_oracles import ACTIVATIONS, parts


class Routing(NamedTuple):
    """The arguments of `route_experts` beside its tensors."""

    top_k: int
    scoring: str
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


# (tokens, experts, whether there is a bias, routing), as published models have it.
_ROUTINGS = {
    "Mixtral": (5, 8, False, Routing(2, "softmax", renormalize=True)),
    "Qwen2-MoE": (5, 60, False, Routing(4, "softmax")),
    "Qwen3-MoE": (17, 128, False, Routing(8, "softmax", renormalize=True)),
    "DeepSeek-V2": (5, 160, False, Routing(6, "softmax", groups=8, top_groups=3, scale=16.0)),
    "DeepSeek-V3": (5, 256, True, Routing(8, "sigmoid", renormalize=True, groups=8, top_groups=4, scale=2.5)),
    "Kimi K2": (5, 384, True, Routing(8, "sigmoid", renormalize=True, scale=2.827)),
    "Qwen3-Next": (5, 512, False, Routing(10, "softmax", renormalize=True)),
    "Llama 4": (5, 16, False, Routing(1, "sigmoid")),
    "gpt-oss": (5, 32, False, Routing(4, "softmax_of_top_k")),
    "every expert": (3, 4, False, Routing(4, "softmax", renormalize=True)),
    "one expert": (3, 1, False, Routing(1, "softmax")),
    "one token": (1, 7, True, Routing(3, "sigmoid", scale=0.5)),
    "no token": (0, 8, False, Routing(2, "softmax", renormalize=True)),
    "many tokens": (300, 11, True, Routing(2, "softmax", renormalize=True)),
    "groups of one expert, with a bias": (5, 4, True, Routing(2, "sigmoid", groups=4, top_groups=3)),
    "a bias of the softmax of the chosen": (5, 9, True, Routing(3, "softmax_of_top_k")),
}


def route_experts_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Logits are float32, whatever the model's dtype. Scores differ by more than float32 resolves, or are equal."""
    generator = torch.Generator().manual_seed(seed + 20)
    for label, (tokens, experts, biased, routing) in _ROUTINGS.items():
        logits = _logits(generator, tokens, experts)
        bias = torch.rand(experts, generator=generator) - 0.5 if biased else None
        yield Case(label, (logits, bias, *routing))
    wider = torch.cat((_logits(generator, 5, 8), torch.full((5, 3), 1e3)), 1)
    yield Case("rows of a wider matrix", (wider[:, :8], None, *Routing(3, "softmax")))
    groups = Routing(3, "sigmoid", groups=4, top_groups=2)
    negative = torch.full((8,), -2.0)
    for bias in (None, negative):
        suffix = "" if bias is None else ", with biases below the scores"
        yield Case(f"equal scores{suffix}", (torch.zeros(3, 8), bias, *groups))
        yield Case(f"some equal scores{suffix}", (torch.tensor([[0.5, 1, 0.25, 1, 0, 1, 0.5, 1]]), bias, *groups))
    yield Case("equal scores of one expert", (torch.ones(2, 9), None, *Routing(1, "softmax", renormalize=True)))
    large = torch.tensor([[60.0, -60.0, 0.0, 30.0], [-80.0, -79.0, -78.0, -77.0]])
    yield Case("large logits", (large, None, *Routing(2, "softmax", renormalize=True)))
    yield Case("large negative logits", (large[1:], None, *Routing(2, "sigmoid", renormalize=True)))


def _logits(generator: torch.Generator, tokens: int, experts: int) -> Tensor:
    """float32 [T, E] in [-4, 4], the values of each row in random order."""
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return (order - experts / 2) * (8 / experts)


class _Sizes(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int


_SIZES = {
    "one token": _Sizes(1, 2, 8, 64, 96),
    "five tokens": _Sizes(5, 2, 8, 64, 32),
    "experts without a token": _Sizes(3, 1, 16, 96, 32),
    "every expert": _Sizes(6, 4, 4, 32, 64),
    "one expert": _Sizes(3, 1, 1, 64, 32),
    "odd numbers of tokens and experts": _Sizes(7, 3, 5, 96, 160),
    "many tokens": _Sizes(130, 2, 5, 64, 32),
    "one token, many experts": _Sizes(1, 8, 128, 64, 32),
    "wide hidden states": _Sizes(2, 2, 3, 4096, 48),
    "wide experts": _Sizes(2, 2, 3, 64, 2048),
    "no token": _Sizes(0, 2, 4, 64, 32),
}


# Of quantized experts. What does not depend on how weights are stored is covered by the cases of `experts`.
_OF_STORED = ("one token", "experts without a token", "odd numbers of tokens and experts", "no token")


class _Routed(NamedTuple):
    label: str
    x: Tensor
    ids: Tensor
    weights: Tensor
    sizes: _Sizes


def _routed(dtype: torch.dtype, generator: torch.Generator) -> Iterator[_Routed]:
    """Tokens and their experts, with the adversarial ones that do not depend on the storage of the matrices."""
    for label, sizes in _SIZES.items():
        yield _Routed(label, *_chosen(generator, dtype, sizes), sizes)
    sizes = _Sizes(300, 1, 4, 64, 32)
    x, ids, weights = _chosen(generator, dtype, sizes)
    yield _Routed("all tokens to one expert", x, torch.full_like(ids, 2), weights, sizes)
    sizes = _Sizes(6, 3, 4, 64, 32)
    x, ids, weights = _chosen(generator, dtype, sizes)
    ids[0], ids[1, 0], ids[2, 2], ids[3] = torch.tensor([-1, 4, 99]), -1, 4, -1
    yield _Routed("ids of other experts", x, ids, weights, sizes)
    x, ids, weights = _chosen(generator, dtype, sizes)
    yield _Routed("weights of 0, and below", x, ids, torch.tensor([0.0, -0.5, 2.5]).repeat(6, 1), sizes)
    x, ids, weights = (
        torch.cat((scores, scores.flip(1)), 1)[:, : scores.shape[1]] for scores in _chosen(generator, dtype, sizes)
    )
    yield _Routed("rows of wider matrices", x, ids, weights, sizes)
    x, ids, weights = _chosen(generator, dtype, sizes)
    x[0] = 0
    yield _Routed("a row of zeros", x, ids, weights, sizes)
    x, ids, weights = _chosen(generator, dtype, sizes)
    yield _Routed("large inputs", x * 8, ids, weights, sizes)


def _chosen(generator: torch.Generator, dtype: torch.dtype, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], distinct ids int64 [T, K], weights float32 [T, K] that add up to 1 if a token has several experts."""
    x = torch.randn(sizes.tokens, sizes.hidden, generator=generator).to(dtype)
    scores = torch.rand(sizes.tokens, sizes.experts, generator=generator)
    ids = scores.argsort(-1)[:, : sizes.top_k].contiguous()
    weights = torch.rand(sizes.tokens, sizes.top_k, generator=generator) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True) if sizes.top_k > 1 else weights


def experts_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 21)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    odd = _Sizes(5, 2, 3, 33, 19)
    routed = [*_routed(dtype, generator), _Routed("odd sizes", *_chosen(generator, dtype, odd), odd)]
    for index, (label, x, ids, weights, sizes) in enumerate(routed):
        gate_up = random(sizes.experts, 2 * sizes.intermediate, sizes.hidden, scale=1.5 * sizes.hidden**-0.5)
        down = random(sizes.experts, sizes.hidden, sizes.intermediate, scale=sizes.intermediate**-0.5)
        activation = ACTIVATIONS[index % 3]
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if index % 2:
            biases = (
                random(sizes.experts, 2 * sizes.intermediate, scale=1),
                random(sizes.experts, sizes.hidden, scale=1),
            )
        suffix = f"{activation}{', with biases' if index % 2 else ''}"
        yield Case(f"{label}, {suffix}", (x, ids, weights, gate_up, down, *biases, activation))
    for label, x, ids, weights, sizes in (case for case in routed if case.label in ("large inputs", "odd sizes")):
        gate_up = random(sizes.experts, 2 * sizes.intermediate, sizes.hidden, scale=1.5 * sizes.hidden**-0.5)
        down = random(sizes.experts, sizes.hidden, sizes.intermediate, scale=sizes.intermediate**-0.5)
        yield Case(f"{label}, silu_clamped", (x, ids, weights, gate_up, down, None, None, "silu_clamped"))
        up, up_bias = gate_up[:, : sizes.intermediate], random(sizes.experts, sizes.intermediate, scale=1)
        down_bias = random(sizes.experts, sizes.hidden, scale=1)
        yield Case(f"{label}, relu2", (x, ids, weights, up, down, None, None, "relu2"))
        yield Case(f"{label}, relu2, with biases", (x, ids, weights, up, down, up_bias, down_bias, "relu2"))


def experts_int8_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 22)

    def matrix(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        values = torch.randint(-127, 128, (experts, rows, columns), generator=generator, dtype=torch.int8)
        scales = torch.rand(experts, rows, generator=generator) + 0.5
        return values, scales * (2 / 127 * columns**-0.5)

    routed = [case for case in _routed(dtype, generator) if case.label in (*_OF_STORED, "many tokens")]
    chosen = [(case, ACTIVATIONS[index % 3]) for index, case in enumerate(routed)]
    for (label, x, ids, weights, sizes), activation in (*chosen, (routed[2], "relu2")):
        gate_up = matrix(sizes.experts, parts(activation) * sizes.intermediate, sizes.hidden)
        down = matrix(sizes.experts, sizes.hidden, sizes.intermediate)
        yield Case(f"{label}, {activation}", (x, ids, weights, *gate_up, *down, activation))


def experts_fp8_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 24)

    def matrix(experts: int, rows: int, columns: int, blocks: tuple[int, int], count: int = 1) -> tuple[Tensor, Tensor]:
        scales = fp8_scales(generator, experts, count * -(-rows // blocks[0]), -(-columns // blocks[1]))
        return random_fp8(generator, experts, count * rows, columns), scales * (30 * columns**-0.5)

    odd = _Sizes(5, 2, 3, 96, 72)
    routed = [case for case in _routed(dtype, generator) if case.label in (*_OF_STORED, "many tokens")]
    routed.append(_Routed("odd sizes", *_chosen(generator, dtype, odd), odd))
    for index, (label, x, ids, weights, sizes) in enumerate(routed):
        blocks = ((1, ALL_INPUTS), (128, 128), (32, 32), (48, 64))[index % 4]
        gate_up = matrix(sizes.experts, sizes.intermediate, sizes.hidden, blocks, 2)
        down = matrix(sizes.experts, sizes.hidden, sizes.intermediate, blocks)
        activation = ACTIVATIONS[index % 3]
        name = f"{label}, blocks of {blocks[0]} x {blocks[1]}, {activation}"
        yield Case(name, (x, ids, weights, *gate_up, *down, *blocks, activation))
    routed = [case for case in _routed(dtype, generator) if case.label in ("every expert", "all tokens to one expert")]
    routed.append(_Routed("odd sizes", *_chosen(generator, dtype, odd), odd))
    for (label, x, ids, weights, sizes), blocks in itertools.product(routed, ((1 << 20, ALL_INPUTS), (32, 32))):
        gate_up = matrix(sizes.experts, sizes.intermediate, sizes.hidden, blocks, 2)
        down = matrix(sizes.experts, sizes.hidden, sizes.intermediate, blocks)
        for _, scale in (gate_up, down):  # of neighbours, up to 64 times as large
            scale *= torch.exp2(-torch.randint(0, 7, scale.shape, generator=generator).float())
        name = f"{label}, scales of different magnitude of blocks of {blocks[0]} x {blocks[1]}"
        yield Case(name, (x, ids, weights, *gate_up, *down, *blocks, "silu"))
    for (label, x, ids, weights, sizes), blocks in zip(routed, ((1, ALL_INPUTS), (48, 64), (128, 128)), strict=True):
        for activation in ("swiglu_clamped", "relu2"):
            count = parts(activation)
            gate_up = matrix(sizes.experts, sizes.intermediate, sizes.hidden, blocks, count)
            down = matrix(sizes.experts, sizes.hidden, sizes.intermediate, blocks)
            shapes = (sizes.experts, count * sizes.intermediate), (sizes.experts, sizes.hidden)
            biases = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            name = f"{label}, blocks of {blocks[0]} x {blocks[1]}, {activation}, with biases"
            yield Case(name, (x, ids, weights, *gate_up, *down, *blocks, activation, *biases))


def experts_gguf_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 23)

    def rows(experts: int, outputs: int, inputs: int, quant_type: str) -> Tensor:
        return random_gguf_rows(generator, experts * outputs, inputs, quant_type).view(experts, outputs, -1)

    def case(
        label: str, routed: _Routed, types: tuple[str, str], activation: str = "silu", biased: bool = False
    ) -> Case:
        sizes = routed.sizes
        count = parts(activation)
        gate_up = rows(sizes.experts, count * sizes.intermediate, sizes.hidden, types[0])
        down = rows(sizes.experts, sizes.hidden, sizes.intermediate, types[1])
        args = (*routed[1:4], gate_up, types[0], down, types[1], activation)
        if not biased:
            return Case(f"{label}, {' and '.join(types)}, {activation}", args, gguf_capability(*types))
        shapes = (sizes.experts, count * sizes.intermediate), (sizes.experts, sizes.hidden)
        biases = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        return Case(f"{label}, {' and '.join(types)}, {activation}, with biases", (*args, *biases))

    for index, routed in enumerate(labelled for labelled in _routed(dtype, generator) if labelled.label in _OF_STORED):
        yield case(routed.label, routed, (("Q8_0", "Q4_0"), ("Q4_1", "Q8_0"))[index % 2], ACTIVATIONS[index % 3])
    sizes = _Sizes(3, 2, 3, 256, 256)
    x, ids, weights = _chosen(generator, dtype, sizes)
    small = _Routed("blocks of 256", x / 16, ids, weights, sizes)  # random bits give large weights
    for types in (("Q4_K", "Q6_K"), ("Q5_K", "Q4_K"), ("Q6_K", "Q5_0"), ("Q2_K", "Q3_K"), ("Q3_K", "Q5_1")):
        yield case(small.label, small, types)
    for biased in (False, True):
        yield case("without a gate", small, ("Q4_K", "Q8_0"), "relu2", biased=biased)
    for types in (("MXFP4", "MXFP4"), ("IQ4_NL", "IQ4_XS"), ("NF4", "FP4")):
        yield case("with a table", small, types, "swiglu_clamped", biased=types[0] != "NF4")
    mixed = (("IQ2_XXS", "IQ3_S"), ("IQ1_M", "IQ2_S"), ("TQ2_0", "TQ1_0"), ("IQ3_XXS", "IQ2_XS"), ("IQ1_S", "Q4_K"))
    for types in mixed:
        yield case("with codebooks", small, types)
