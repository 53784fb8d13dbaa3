"""The whole engine of `srv` on the simulated device: scheduler, runner, sampler and this plugin's backends.

Operands on the wrong device, or results read before they have come, fail here and would pass on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from srv.io.messages import Abort, FlushCache
from srv.testing.engine import LocalEngine
from srv.types import FinishReason, RequestSpec, SamplingParams

OUTPUT = 8
LENGTHS = (1, 6, 16, 17, 23)
EAGER = "--disable-graphs"
PLAIN = "--disable-overlap-schedule"


class Small:
    """A random model on disk, prompts, and what transformers makes of them on the host."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
        )
        self.folder = folder
        self.model = LlamaForCausalLM(config).eval()
        self.model.save_pretrained(folder)
        self.prompts = [[5 + length, *torch.randint(3, 61, (length - 1,)).tolist()] for length in LENGTHS]
        self.tokens = [self._greedy(prompt) for prompt in self.prompts]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def _greedy(self, prompt: list[int]) -> list[int]:
        output: list[int] = []
        for _ in range(OUTPUT):
            best = self.logits(prompt + output)[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "a near tie in the reference: choose another seed"
            output.append(int(best.indices[0]))
        return output


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("llama"))


@contextmanager
def engine(small: Small, *flags: str) -> Iterator[LocalEngine]:
    arguments = ["--device", "toy", "--model-path", str(small.folder), "--dtype", "float32"]
    with LocalEngine.launch([*arguments, "--max-running-requests", "8", *flags]) as launched:
        yield launched
        launched.step()
        launched.check_integrity(deep=True)
        assert launched.stats().pages_held == 0


@contextmanager
def paged_engine(small: Small, *flags: str, pool: int = 256) -> Iterator[LocalEngine]:
    """The same with pages of four tokens, a pool of `pool` tokens and six requests at a time."""
    words = ["--device", "toy", "--model-path", str(small.folder), "--dtype", "float32", "--max-running-requests", "6"]
    with LocalEngine.launch([*words, "--page-size", "4", "--max-total-tokens", str(pool), *flags]) as launched:
        yield launched
        launched.step()
        launched.check_integrity(deep=True)
        assert launched.stats().pages_held == 0


def messages(small: Small, **params: Any) -> list[RequestSpec]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUT, **params}
    return [
        RequestSpec(id=f"request {number}", tokens=tuple(prompt), params=SamplingParams(**sampling))
        for number, prompt in enumerate(small.prompts)
    ]


@pytest.mark.parametrize("overlap", [[], ["--disable-overlap-schedule"]], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize(("page", "chunk"), [(1, 16), (16, 5), (4, -1)])
def test_greedy_tokens_are_those_of_the_host(small: Small, page: int, chunk: int, overlap: list[str]) -> None:
    flags = ["--page-size", str(page), "--chunked-prefill-size", str(chunk), "--max-total-tokens", "512"]
    if chunk < 0:
        flags += ["--max-prefill-tokens", "32"]
    with engine(small, *flags, *overlap) as served:
        missed = served.generate(messages(small))
        hits = served.generate(messages(small))
    assert [result.tokens for result in missed] == small.tokens
    assert [result.tokens for result in hits] == small.tokens
    assert [result.cached_tokens for result in hits] == [(length - 1) // page * page for length in LENGTHS]


@pytest.mark.parametrize("overlap", [[], ["--disable-overlap-schedule"]], ids=["overlap", "no-overlap"])
def test_retraction_and_abort_give_every_page_back(small: Small, overlap: list[str]) -> None:
    flags = ["--page-size", "4", "--max-total-tokens", "64", "--schedule-conservativeness", "0.01"]
    with engine(small, *flags, *overlap) as served:
        assert [result.tokens for result in served.generate(messages(small))] == small.tokens
        assert served.stats().retractions > 0
        for message in messages(small):
            served.send(message)
        for _ in range(3):
            served.step()
        served.send(Abort(None))
        served.run([message.id for message in messages(small)])
        assert {result.finish for result in served.results.values()} <= {FinishReason.ABORT, FinishReason.LENGTH}
        served.step()
        served.send(FlushCache(0))
        stats = served.stats()
        assert stats.pages_free == stats.pages_total


@pytest.fixture(scope="module")
def both(small: Small) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """With overlap and without."""
    flags = ["--max-total-tokens", "512", "--chunked-prefill-size", "9"]
    with engine(small, *flags) as overlapped, engine(small, *flags, "--disable-overlap-schedule") as plain:
        yield overlapped, plain


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"logit_bias": ((7, 3.0),), "min_tokens": 4, "stop_token_ids": (7,)},
        {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "logprobs": 2},
    ],
    ids=["filters", "penalties", "bias", "all"],
)
def test_tokens_are_the_same_with_overlap_and_without(
    small: Small, both: tuple[LocalEngine, LocalEngine], params: dict[str, Any]
) -> None:
    overlapped, plain = ([result.tokens for result in one.generate(messages(small, **params))] for one in both)
    assert overlapped == plain
    assert overlapped != small.tokens


def test_logprobs_are_those_of_the_host(small: Small, both: tuple[LocalEngine, LocalEngine]) -> None:
    results = both[0].generate(messages(small, logprobs=2, prompt_logprobs=1))
    for prompt, result in zip(small.prompts, results, strict=True):
        text = prompt + result.tokens
        expected = small.logits(text).log_softmax(-1)
        entries = [*result.prompt_logprobs, *result.logprobs]
        assert [entry.token for entry in entries] == text[1:]
        assert [entry.logprob for entry in entries] == pytest.approx(
            [float(row[token]) for row, token in zip(expected[:-1], text[1:], strict=True)], abs=1e-4
        )
