"""Quality of the dtypes of the KV pool: perplexity and greedy choices of the demo model, compared with float32.

    python tests/bench/kv_dtypes.py [--windows 8] [--window 512] [--scales FILE] [--dtypes auto int8 fp8_e4m3 fp8_e5m2]

Weights and activations are float32 throughout, so that only the pool differs. Each window of the text is a prompt of
its own, computed in chunks of 64 tokens, so that most keys and values are read from the pool. `--scales`: a file for
`--quantization-param-path`; without it, 8-bit floats are stored unscaled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from srv.models.locate import demo_model
from srv.models.read import read_facts
from srv.server.text.tokenizer import load_text_processor
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams

TEXT = Path(__file__).parent / "peers" / "perplexity.txt"


class Scores(NamedTuple):
    """Of every token but the first of a window: its log-probability, and the token with the highest."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def read(windows: Sequence[list[int]], *flags: str) -> Scores:
    fixed = ("--device", "cpu", "--model-path", str(demo_model()), "--dtype", "float32", "--dequantize-weights")
    params, scores = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1), Scores([], [])
    with CheckedEngine.launch([*fixed, "--chunked-prefill-size", "64", *flags]) as engine:
        for number, window in enumerate(windows):
            (result,) = engine.generate([RequestSpec(id=str(number), tokens=tuple(window), params=params)])
            scores.logprobs.extend(entry.logprob for entry in result.prompt_logprobs)
            scores.best.extend(entry.top[0][0] for entry in result.prompt_logprobs)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--scales")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "float16", "int8", "fp8_e4m3", "fp8_e5m2"])
    options = parser.parse_args()
    ids = load_text_processor(read_facts(demo_model())).encode(TEXT.read_text())
    windows = [
        ids[start : start + options.window] for start in range(0, options.windows * options.window, options.window)
    ]
    exact: Scores | None = None
    for dtype in options.dtypes:
        scaled = ["--quantization-param-path", options.scales] if options.scales and dtype.startswith("fp8") else []
        scores = read(windows, "--kv-cache-dtype", dtype, *scaled)
        exact = exact or scores
        lost = scores.perplexity / exact.perplexity - 1
        same = sum(a == b for a, b in zip(exact.best, scores.best, strict=True)) / len(exact.best)
        print(f"{dtype:>9}: perplexity {scores.perplexity:.3f} ({lost:+.2%}), {same:.2%} equal greedy choices")


if __name__ == "__main__":
    main()
