"""How many tokens the steps of an engine computed, as the counts of a histogram. Must not know what a step is."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's, of vllm:iteration_tokens_total


class StepTokens:
    """`counts[i]`: steps with at most BOUNDS[i] tokens and more than the bound before; the last: with more than all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0

    def add(self, tokens: int) -> None:
        self.counts[bisect_left(BOUNDS, tokens)] += 1
        self.total += tokens
