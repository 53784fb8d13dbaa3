"""The real engine in the check's own process, with the small model, and watched: after every step every page is
accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from srv.errors import Refusal
from srv.specs import ModelFacts
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.reference import Reference
from srv.testing.conformance.setups import HEAD_DIMS, declared_dtypes, resolved
from srv.testing.conformance.small import write_model
from srv.testing.conformance.values import says
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import RequestSpec, SamplingParams

CONTEXT = 1024
POOL_TOKENS = 6144
RUNNING = 16
OUTPUT = 10
LEAST_STRETCH = 8
FIRST_TOKEN, LAST_TOKEN = 3, 258  # the bytes


@dataclass
class Stand:
    """An engine at work, the reference of its model, and prompts about the engine's pages."""

    engine: CheckedEngine
    reference: Reference
    dtype: str
    end_tokens: tuple[int, ...]

    @property
    def page_size(self) -> int:
        return self.engine.ready.page_size

    @property
    def stretch(self) -> int:
        """A page, or as many pages as make a text worth the name."""
        return stretch(self.page_size)

    def prompts(self) -> list[list[int]]:
        """Prompts of lengths about those of pages, each beginning with another token, so that none shares pages."""
        size = self.stretch
        lengths = (1, 2, 7, size - 1, size, size + 1, 2 * size + 3)
        return [prompt(length, number) for number, length in enumerate(lengths)]

    def generate(self, prompts: Sequence[Sequence[int]], count: int = OUTPUT, **params: Any) -> list[GenerationResult]:
        """Greedy output that only its length ends, unless `params` say otherwise. Fault if a request fails."""
        results = self.engine.generate(
            [request(f"{number}", each, count, **params) for number, each in enumerate(prompts)]
        )
        for result in results:
            if result.error is not None:
                raise Fault(f"a request failed: {result.error[1]} [{result.error[0]}]")
        return results

    def check(self, prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult], what: str) -> None:
        """Every output token is the reference's, or as good as."""
        for each, result in zip(prompts, results, strict=True):
            self.reference.check_greedy(each, result.tokens, self.dtype, what)


def stretch(page_size: int) -> int:
    """The least multiple of a page that is no shorter than `LEAST_STRETCH` tokens."""
    return page_size * -(-LEAST_STRETCH // page_size)


def prompt(length: int, number: int) -> list[int]:
    """`length` bytes' tokens, the first of which tells the prompt's number."""
    generator = torch.Generator().manual_seed(100 + number)
    rest = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (length - 1,), generator=generator).tolist()
    return [FIRST_TOKEN + number, *rest]


def request(name: str, tokens: Sequence[int], count: int = OUTPUT, **params: Any) -> RequestSpec:
    sampling = SamplingParams(max_tokens=count, **{"temperature": 0.0, "ignore_eos": True, **params})
    return RequestSpec(id=name, tokens=tuple(tokens), params=sampling)


def model_for(kit: Kit, dtype: str, quantization: str | None = None) -> ModelFacts:
    """The first of the small models that the plugin takes in a dtype, with nothing else set."""
    refused: list[str] = []
    for head_dim in HEAD_DIMS:
        facts = small_model(dtype, head_dim=head_dim, context_length=CONTEXT, quantization=quantization)
        try:
            resolved(kit, facts, says("dtype", dtype))
        except Refusal as refusal:
            refused += [str(each) for each in refusal.rejections]
            continue
        return facts
    raise Fault(f"it takes no small model in {dtype}: {'; '.join(dict.fromkeys(refused))}")


def folder_for(kit: Kit, facts: ModelFacts) -> Path:
    """The model on disk. Its weights are the same numbers in every dtype; only the configuration names one."""
    return write_model(kit.scratch / f"model-{facts.dtype}-{facts.head_dim}-{facts.quantization or 'plain'}", facts)


@contextmanager
def stand(kit: Kit, dtype: str = "", stored: str | None = None, **flags: object) -> Iterator[Stand]:
    """An engine as `srv launch` would build it. Flags that are True stand alone; without more, no graphs.

    `stored`: the method by which the weights are quantized, if they are.
    """
    chosen = dtype or declared_dtypes(kit)[0]
    facts = model_for(kit, chosen, stored)
    folder = folder_for(kit, facts)
    words: dict[str, object] = {
        "device": kit.device_text,
        "model_path": folder,
        "dtype": chosen,
        "max_total_tokens": POOL_TOKENS,
        "max_running_requests": RUNNING,
        "disable_graphs": True,
        **flags,
    }
    reference = Reference(folder)
    with CheckedEngine.launch(arguments(words)) as engine:
        yield Stand(engine, reference, chosen, facts.end_tokens)


def arguments(words: dict[str, object]) -> list[str]:
    """A command line. None and False leave a flag out."""
    line: list[str] = []
    for name, value in words.items():
        if value is not None and value is not False:
            line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return line
