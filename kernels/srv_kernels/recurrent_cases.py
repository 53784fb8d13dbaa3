"""Test cases for the ops of recurrent layers: rows of mixed lengths, in slots of mixed order, and edge cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from srv_kernels.cases import Case, random_tensor, row_slices

_ROWS = ((1,), (1, 1, 1), (5,), (64,), (65, 1, 3), (1, 130, 2, 1), (1, 1, 66))  # tokens of each row
_SLOTS = 7


def _slots(generator: torch.Generator, lens: Sequence[int]) -> Tensor:
    return torch.randperm(_SLOTS, generator=generator)[: len(lens)]


def causal_conv1d_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 11)
    for number, lens in enumerate(_ROWS):
        for channels, width in ((6, 4), (40, 2), (33, 5)):
            x = row_slices(generator, sum(lens), channels, dtype)
            weight = random_tensor(generator, channels, width, dtype=dtype)
            bias = random_tensor(generator, channels, dtype=dtype) if number % 2 else None
            states = random_tensor(generator, _SLOTS, channels, width, dtype=dtype)
            label = f"rows of {', '.join(map(str, lens))} tokens, {channels} channels, width {width}"
            args = (x, weight, bias, states, _slots(generator, lens), lens)
            yield Case(label, args)
            yield Case(f"{label}, without activation", (*args, "none"))
    lens = (2, 1)
    states = torch.full((_SLOTS, 4, 4), torch.inf, dtype=dtype)
    states[2:4] = 0
    x, weight = torch.zeros(3, 4, dtype=dtype), random_tensor(generator, 4, 4, dtype=dtype)
    yield Case("zeros, and other slots that are not finite", (x, weight, None, states, torch.tensor([3, 2]), lens))


def gated_delta_rule_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 12)
    for lens in _ROWS:
        for heads, value_heads, key_dim, value_dim in ((1, 1, 8, 8), (2, 4, 16, 12), (2, 2, 32, 64)):
            sizes = (heads * key_dim, heads * key_dim, value_heads * value_dim)
            tokens = sum(lens)
            q, k, v = random_tensor(generator, tokens, sum(sizes), dtype=dtype).split(sizes, -1)
            states = random_tensor(generator, _SLOTS, value_heads, key_dim, value_dim, dtype=torch.float32)
            label = f"rows of {', '.join(map(str, lens))} tokens, {heads}/{value_heads} heads of {key_dim}, {value_dim}"
            yield Case(
                label,
                (
                    q.view(tokens, heads, key_dim),
                    k.view(tokens, heads, key_dim),
                    v.view(tokens, value_heads, value_dim),
                    -random_tensor(generator, tokens, value_heads, dtype=torch.float32).abs(),
                    torch.rand(tokens, value_heads, generator=generator),
                    states,
                    _slots(generator, lens),
                    lens,
                ),
            )
    lens, zeros = (70,), torch.zeros(70, 2, 8, dtype=dtype)
    states = torch.full((_SLOTS, 2, 8, 8), torch.inf)
    states[4] = 1
    decay = torch.zeros(70, 2)
    decay[1::2] = -80.0  # forgets everything
    args = (zeros, zeros, zeros, decay, torch.ones(70, 2), states, torch.tensor([4]), lens)
    yield Case("zero vectors, extreme decays, and other slots that are not finite", args)


def state_space_scan_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 13)
    for number, lens in enumerate(_ROWS):
        for heads, groups, head_dim, size in ((1, 1, 8, 8), (6, 2, 12, 16), (4, 4, 32, 64)):
            tokens, sizes = sum(lens), (heads * head_dim, groups * size, groups * size)
            x, b, c = random_tensor(generator, tokens, sum(sizes), dtype=dtype).split(sizes, -1)
            states = random_tensor(generator, _SLOTS, heads, head_dim, size, dtype=torch.float32)
            step = torch.rand(tokens, heads, generator=generator) if number % 2 == 0 else None
            label = f"rows of {', '.join(map(str, lens))} tokens, {heads}/{groups} heads of {head_dim}, {size}"
            yield Case(
                label,
                (
                    x.view(tokens, heads, head_dim),
                    b.view(tokens, groups, size),
                    c.view(tokens, groups, size),
                    -random_tensor(generator, tokens, heads, dtype=torch.float32).abs(),
                    step,
                    states,
                    _slots(generator, lens),
                    lens,
                ),
            )
    lens = (140,)
    states = torch.full((_SLOTS, 2, 8, 8), torch.inf)
    states[4] = 1
    x, b, c = (random_tensor(generator, 140, 2, 8, dtype=dtype) for _ in range(3))
    decay = torch.full((140, 2), -0.01)
    decay[1::7] = -900.0  # forgets everything, and the next tokens nearly nothing
    args = (x, b, c, decay, None, states, torch.tensor([4]), lens)
    yield Case("extreme decays, and other slots that are not finite", args)


def gated_linear_recurrence_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 13)
    for lens in (*_ROWS, (300, 2)):
        for channels in (6, 40):
            x = row_slices(generator, sum(lens), channels, dtype)
            decay = -random_tensor(generator, sum(lens), channels, dtype=torch.float32).abs()
            states = random_tensor(generator, _SLOTS, channels, dtype=torch.float32)
            label = f"rows of {', '.join(map(str, lens))} tokens, {channels} channels"
            yield Case(label, (x, decay, states, _slots(generator, lens), lens))
    lens, decay = (70, 1), torch.zeros(71, 8)
    decay[1::2] = -200.0  # forgets everything
    states = torch.full((_SLOTS, 8), torch.inf)
    states[2:4] = 1 / 3
    args = (torch.zeros(71, 8, dtype=dtype), decay, states, torch.tensor([3, 2]), lens)
    yield Case("zeros, extreme decays, and other slots that are not finite", args)


def selective_scan_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 14)
    for lens in _ROWS:
        for channels, size in ((6, 4), (24, 16)):
            tokens, sizes = sum(lens), (channels, size, size)
            x, b, c = random_tensor(generator, tokens, sum(sizes), dtype=dtype).split(sizes, -1)
            rates = -random_tensor(generator, channels, size, dtype=torch.float32).abs()
            states = random_tensor(generator, _SLOTS, channels, size, dtype=torch.float32)
            step = torch.rand(tokens, channels, generator=generator)
            label = f"rows of {', '.join(map(str, lens))} tokens, {channels} channels, states of {size}"
            yield Case(label, (x, b, c, rates, step, states, _slots(generator, lens), lens))
    lens, step = (70, 1), torch.full((71, 8), 0.01)
    step[1::7] = 900.0  # forgets everything
    states = torch.full((_SLOTS, 8, 4), torch.inf)
    states[2:4] = 1 / 3
    x, b, c = (random_tensor(generator, 71, size, dtype=dtype) for size in (8, 4, 4))
    args = (x, b, c, torch.full((8, 4), -1.0), step, states, torch.tensor([3, 2]), lens)
    yield Case("extreme steps, and other slots that are not finite", args)
