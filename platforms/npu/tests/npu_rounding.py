"""How far rounding to 16 bits may move a model's logits and its greedy tokens: bars that follow from what is measured.

    exact    float32 logits on the CPU
    host     the CPU's 16-bit logits of the same tokens, each given the ones before (teacher-forced)
    sigma    root mean square of what rounding in `host` does to the margin between a likely token and the best

But for MEASURED no figure here was fitted. The assumptions are these, and each bar names those it rests on:

 1. The platform rounds at most twice where the host rounds once. Errors of roundings are independent and their squares
    add, so it is at most FURTHER = sqrt(2) times as far from exact as the host is; measured over a prompt, give or take
    MEASURED (hosts with AVX2 alone were met at 1.417 in float16).
 2. What rounding does is proportional to the unit of the type, 2^-8 or 2^-11: in bfloat16 eight times what it is in
    float16. An error of any other origin is not. Each of the two distances may be off by FURTHER from that.
 3. What rounding does to a margin is normally distributed, with FURTHER * sigma at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

FURTHER = math.sqrt(2)
MEASURED = 1.05  # a ratio of two distances, each of the logits of some 150 tokens
COARSER = 2.0**3  # 8 bits of significand against 11
CHANCE = 0.01  # that a bar is passed by rounding alone
_LIKELY = 8  # tokens a place whose margins count


def distance(one: Tensor, other: Tensor) -> float:
    """Root mean square difference, in logits."""
    return float((one - other).square().mean().sqrt())


def comes_from_rounding(bfloat16: float, float16: float) -> bool:
    """Whether distances from exact in the two types stand to one another as their units do (2)."""
    return COARSER / FURTHER**2 <= bfloat16 / float16 <= COARSER * FURTHER**2


@dataclass(frozen=True)
class Rounding:
    """What rounding does to one model in one dtype. `sigma` in logits, as the host has it."""

    sigma: float

    @classmethod
    def measured(cls, exact: Tensor, host: Tensor) -> Rounding:
        """exact, host: float32 [places, vocab], of the same text."""
        likely = exact.topk(_LIKELY).indices
        errors = (host - exact).gather(1, likely)
        return cls(float((errors[:, 1:] - errors[:, :1]).square().mean().sqrt()))

    def near_tie(self, places: int) -> float:
        """The margin, in logits, that rounding closes at any of so many places with a chance of CHANCE at most (1, 3).

        A token that is further behind exact's best than that was not chosen by rounding.
        """
        return NormalDist().inv_cdf(1 - CHANCE / places) * FURTHER * self.sigma

    def most_other(self, exact: Tensor) -> int:
        """How many tokens other than exact's best rounding chooses at these places, but for a chance of CHANCE (1, 3).

        exact: float32 [places, vocab]. A sum of many rare events is Poisson-distributed.
        """
        best = exact.topk(_LIKELY).values
        chances = torch.special.ndtr((best[:, 1:] - best[:, :1]).double() / (FURTHER * self.sigma))
        expected, most = float(chances.sum(1).clamp(max=1).sum()), 0
        term = below = math.exp(-expected)
        while below < 1 - CHANCE:
            most += 1
            term *= expected / most
            below += term
        return most
