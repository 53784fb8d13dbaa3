"""The real engine with the small model, in the check's own process. After every step, every page is accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from srv.errors import Refusal
from srv.specs import ModelFacts
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.reference import Reference
from srv.testing.conformance.setups import HEAD_DIMS, declared_dtypes, resolve_for
from srv.testing.conformance.small import write_model
from srv.testing.conformance.values import user_statement
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import RequestSpec, SamplingParams

CONTEXT_LENGTH = 1024
POOL_TOKENS = 6144
MAX_RUNNING = 16
OUTPUT_TOKENS = 10
MIN_SPAN = 8
FIRST_TOKEN, LAST_TOKEN = 3, 258  # of the byte tokens


@dataclass
class EngineUnderTest:
    """A running engine, the reference for its model, and prompts that fit its page size."""

    engine: CheckedEngine
    reference: Reference
    dtype: str
    end_tokens: tuple[int, ...]

    @property
    def page_size(self) -> int:
        return self.engine.ready.page_size

    @property
    def page_span(self) -> int:
        """See the function `page_span`."""
        return page_span(self.page_size)

    def prompts(self) -> list[list[int]]:
        """Prompts with lengths around multiples of the page size. Their first tokens differ, so none shares pages."""
        size = self.page_span
        lengths = (1, 2, 7, size - 1, size, size + 1, 2 * size + 3)
        return [prompt(length, number) for number, length in enumerate(lengths)]

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int = OUTPUT_TOKENS, **params: Any
    ) -> list[GenerationResult]:
        """Greedy output of `count` tokens, unless `params` say otherwise. Fault if a request fails."""
        results = self.engine.generate(
            [request(f"{number}", tokens, count, **params) for number, tokens in enumerate(prompts)]
        )
        for result in results:
            if result.error is not None:
                raise Fault(f"a request failed: {result.error[1]} [{result.error[0]}]")
        return results

    def check(self, prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult], what: str) -> None:
        """Fault unless every output token is that of the reference, within the tolerance."""
        for tokens, result in zip(prompts, results, strict=True):
            self.reference.check_greedy(tokens, result.tokens, self.dtype, what)


def page_span(page_size: int) -> int:
    """The smallest multiple of the page size that is at least `MIN_SPAN` tokens."""
    return page_size * -(-MIN_SPAN // page_size)


def prompt(length: int, number: int) -> list[int]:
    """`length` byte tokens; the first one depends on the prompt's number."""
    generator = torch.Generator().manual_seed(100 + number)
    rest = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (length - 1,), generator=generator).tolist()
    return [FIRST_TOKEN + number, *rest]


def request(name: str, tokens: Sequence[int], count: int = OUTPUT_TOKENS, **params: Any) -> RequestSpec:
    sampling = SamplingParams(max_tokens=count, **{"temperature": 0.0, "ignore_eos": True, **params})
    return RequestSpec(id=name, tokens=tuple(tokens), params=sampling)


def accepted_model(
    kit: Kit, dtype: str, quantization: str | None = None, fields: Mapping[str, Any] = MappingProxyType({})
) -> ModelFacts:
    """The first small model that the plugin accepts in a dtype, with no other argument set.

    `fields`: of its configuration, as those of `small_model`.
    """
    refusals: list[str] = []
    for head_dim in HEAD_DIMS:
        facts = small_model(
            dtype, head_dim=head_dim, context_length=CONTEXT_LENGTH, quantization=quantization, fields=fields
        )
        try:
            resolve_for(kit, facts, user_statement("dtype", dtype))
        except Refusal as refusal:
            refusals += [str(rejection) for rejection in refusal.rejections]
            continue
        return facts
    raise Fault(f"it accepts no small model in {dtype}: {'; '.join(dict.fromkeys(refusals))}")


def model_folder(kit: Kit, facts: ModelFacts) -> Path:
    """The model on disk. Its weights have the same values in every dtype; only the configuration differs."""
    kind = f"{facts.quantization or 'plain'}-{facts.config['model_type']}"
    return write_model(kit.scratch / f"model-{facts.dtype}-{facts.head_dim}-{kind}", facts)


@contextmanager
def engine_under_test(
    kit: Kit,
    dtype: str = "",
    quantization: str | None = None,
    kind: type[CheckedEngine] = CheckedEngine,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **flags: object,
) -> Iterator[EngineUnderTest]:
    """An engine as `srv launch` builds it. A flag that is True has no value; graphs are disabled by default.

    quantization: the method by which the weights are quantized, if they are. fields: of the model's configuration.
    """
    chosen = dtype or declared_dtypes(kit)[0]
    facts = accepted_model(kit, chosen, quantization, fields)
    folder = model_folder(kit, facts)
    settings: dict[str, object] = {
        "device": kit.device_text,
        "model_path": folder,
        "dtype": chosen,
        "max_total_tokens": POOL_TOKENS,
        "max_running_requests": MAX_RUNNING,
        "disable_graphs": True,
        **flags,
    }
    reference = Reference(folder)
    with kind.launch(command_line(settings)) as engine:
        yield EngineUnderTest(engine, reference, chosen, facts.end_tokens)


def command_line(settings: dict[str, object]) -> list[str]:
    """The command line; flags that are None or False are omitted."""
    arguments: list[str] = []
    for name, value in settings.items():
        if value is not None and value is not False:
            arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return arguments
