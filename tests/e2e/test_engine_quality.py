"""What numbers of 8 bits cost in quality, activations or keys and values, on the demo model and this project's pages.

Perplexity over windows of 512 tokens, every token but a window's first, through the engine as it serves; the yardstick
is the same file with its blocks made plain, all in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from srv.io.messages import Generate
from srv.models.locate import demo_model
from srv.models.read import read_facts
from srv.server.tokenizer import load_text_processor
from srv.testing.engine import WatchedEngine
from srv.types import SamplingParams
from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = Path(__file__).resolve().parents[1] / "bench" / "peers" / "perplexity.txt"
WINDOW = 512
LEAST_TOKENS = 16_000
MOST_LOST = 0.005
LEAST_AGREEMENT = 0.9


@dataclass(frozen=True)
class Read:
    """What an engine makes of a text: its log probability, token by token, and its own greedy choice at each."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def read(windows: Sequence[list[int]], *flags: str) -> Read:
    """All windows through an engine with these flags."""
    found = Read([], [])
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with WatchedEngine.launch(["--device", "cpu", "--model-path", str(demo_model()), *flags]) as engine:
        for number, window in enumerate(windows):
            (result,) = engine.generate([Generate(request=str(number), tokens=window, params=params)])
            found.logprobs.extend(entry.logprob for entry in result.prompt_logprobs)
            found.best.extend(entry.top[0][0] for entry in result.prompt_logprobs)
    return found


@covers("dequantize_weights=false", "dequantize_weights=true", "kv_cache_dtype=int8", platform="cpu")
def test_numbers_of_8_bits_lose_no_more_than_half_a_percent(record_property: Callable[[str, object], None]) -> None:
    ids = load_text_processor(read_facts(demo_model())).encode(TEXT.read_text())
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    exact = read(windows, "--dtype", "float32", "--dequantize-weights")
    assert len(exact.logprobs) >= LEAST_TOKENS
    record_property("perplexity, plain in float32", f"{exact.perplexity:.3f}")
    for name, flags in {"blocks": (), "blocks and int8 keys and values": ("--kv-cache-dtype", "int8")}.items():
        served = read(windows, *flags)
        lost = served.perplexity / exact.perplexity - 1
        agreement = sum(a == b for a, b in zip(exact.best, served.best, strict=True)) / len(exact.best)
        record_property(f"perplexity, {name}", f"{served.perplexity:.3f}")
        record_property(f"greedy agreement, {name}", f"{agreement:.4f}")
        told = f"{name}: perplexity {served.perplexity:.3f} is {lost:.2%} above {exact.perplexity:.3f}"
        assert lost <= MOST_LOST, told
        assert agreement >= LEAST_AGREEMENT, f"{name}: only {agreement:.2%} of the best tokens are the same"
