"""Speculative decoding with n-grams on the demo model: acceptance and speed with and without drafts.

    python tests/bench/drafts.py [--streams 1 4 16] [--output 128] [--rounds 3] [--tokens 4] [--clock wall|cpu]

Two kinds of text. "repeats": the prompt is code-like text that the model goes on with almost literally. "new": random
tokens, after which a model that is sampled at a high temperature hardly ever repeats itself. Engines with and without
drafts run in turns; the median of the rounds counts. On a machine that does other work, too, run it with one thread
(OMP_NUM_THREADS=1) and --clock cpu.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from srv.models.locate import demo_model
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams

PROMPT = 96


def requests(kind: str, streams: int, output: int) -> list[RequestSpec]:
    generator = torch.Generator().manual_seed(3)
    specs = []
    for stream in range(streams):
        tokens = torch.randint(1000, 20_000, (PROMPT,), generator=generator).tolist()
        if kind == "repeats":
            tokens = [1000 + stream, *(tokens[:12] * (PROMPT // 12))]
        temperature = 0.0 if kind == "repeats" else 1.0
        params = SamplingParams(max_tokens=output, temperature=temperature, seed=stream, ignore_eos=True)
        specs.append(RequestSpec(id=f"{kind} {stream}", tokens=tuple(tokens), params=params))
    return specs


def launch(flags: Sequence[str]) -> LocalEngine:
    fixed = ("--device", "cpu", "--model-path", str(demo_model()), "--max-running-requests", "16")
    return LocalEngine.launch([*fixed, "--max-total-tokens", "8192", "--disable-radix-cache", *flags])


def run(engine: LocalEngine, specs: list[RequestSpec], clock: Callable[[], float]) -> tuple[float, int, float]:
    """Tokens per second of the decode steps, their number, and the acceptance rate of drafts."""
    for spec in specs:
        engine.send(spec)
    while any(not engine.results[spec.id].tokens for spec in specs):
        engine.step()
    tokens = sum(len(engine.results[spec.id].tokens) for spec in specs)
    before, begin = engine.stats(), clock()
    engine.run([spec.id for spec in specs])
    seconds, after = clock() - begin, engine.stats()
    tokens = sum(len(engine.results[spec.id].tokens) for spec in specs) - tokens
    proposed = after.drafts_proposed - before.drafts_proposed
    accepted = after.drafts_accepted - before.drafts_accepted
    return tokens / seconds, after.steps - before.steps, accepted / max(proposed, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    plain = launch(())
    drafting = launch(("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(options.tokens)))
    for kind in ("repeats", "new"):
        for streams in options.streams:
            specs = requests(kind, streams, options.output)
            rounds = [(run(plain, specs, clock), run(drafting, specs, clock)) for _ in range(options.rounds)]
            without, with_drafts = (statistics.median(measured[way][0] for measured in rounds) for way in (0, 1))
            steps = rounds[0][0][1], rounds[0][1][1]
            print(
                f"{kind:>8}, {streams:>2} streams: {without:7.1f} -> {with_drafts:7.1f} tokens/s"
                f" ({with_drafts / without:.2f}x), {steps[0]} -> {steps[1]} steps,"
                f" {rounds[0][1][2]:.0%} of the drafts accepted",
                flush=True,
            )


if __name__ == "__main__":
    main()
