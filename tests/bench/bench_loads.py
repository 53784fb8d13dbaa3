"""The loads that benchmarks share: numbers of concurrent requests and tokens, and random prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One workload: `requests` concurrent requests with `prompt` tokens each; all share the first `shared` tokens."""

    name: str
    requests: int
    prompt: int
    output: int
    shared: int = 0

    @property
    def counted(self) -> int:
        """The tokens that throughput counts: generated tokens, or prompt tokens if only one token is generated."""
        return self.requests * (self.prompt if self.output == 1 else self.output)

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.output == 1 else "output tokens/s"


WORKLOADS = (
    Workload("1 stream, 128 in, 128 out", 1, 128, 128),
    Workload("4 streams, 128 in, 128 out", 4, 128, 128),
    Workload("16 streams, 128 in, 128 out", 16, 128, 128),
    Workload("prefill of 512", 1, 512, 1),
    Workload("16 requests, shared prefix of 1,000, 32 own, 64 out", 16, 1032, 64, shared=1000),
)


class Prompts:
    """Random token ids, different for every call; the shared prefix stays the same."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab
        self._prefix = self._ids(4096)

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._vocab - 100) for _ in range(count)]

    def draw(self, workload: Workload) -> list[list[int]]:
        return [
            self._prefix[: workload.shared] + self._ids(workload.prompt - workload.shared)
            for _ in range(workload.requests)
        ]

    def prefix(self, workload: Workload) -> list[int]:
        return self._prefix[: workload.shared]
