"""What grammars cost per step: 16 decoding requests with and without masks, in the engine that `srv launch` starts.

    python tests/bench/grammars.py [--rounds 5] [--streams 16] [--model-path PATH]

A round times the same number of steps of both, in turn forwards and backwards, in one warm engine. Printed are the
median and the lower quartile of each, which other work on the machine changes less, and their ratios. The schema has a
long array of objects, so that no request ends before its length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import from_json_schema
from srv.server.text.tokenizer import load_text_processor
from srv.testing.engine import LocalEngine
from srv.types import Grammar, RequestSpec, SamplingParams

STEPS = 60  # that are timed, after those in which the prompts are computed
WARM_STEPS = 6
PROMPT = "Describe a person as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["name", "age", "note"],
                "additionalProperties": False,
            },
            "minItems": 100,
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


class Bench:
    """One engine, and the requests that are run in it."""

    def __init__(self, arguments: Sequence[str], streams: int) -> None:
        self.engine = LocalEngine.launch([*arguments, "--max-running-requests", str(streams), "--disable-radix-cache"])
        model = self.engine.context.model
        text = load_text_processor(model)
        vocabulary = text.vocabulary()
        assert vocabulary is not None, "the model's tokenizer has no bytes per token"
        self.engine.send(vocabulary)
        backend = make("llguidance", GrammarContext(vocabulary, model.vocab_size, model.end_tokens))
        source = from_json_schema(SCHEMA, param="bench")
        self.grammar = Grammar(backend.translate(source, JsonSpacing(none=True)))
        self.tokens = text.encode(PROMPT)
        self.streams, self.runs = streams, 0

    def steps_ms(self, grammar: Grammar | None) -> list[float]:
        """The steps of one run in milliseconds, from one token of the first request to the next."""
        self.runs += 1
        params = SamplingParams(max_tokens=STEPS + 2 * WARM_STEPS, temperature=0.0, ignore_eos=grammar is None)
        names = [f"{self.runs} {number}" for number in range(self.streams)]
        for number, name in enumerate(names):
            self.engine.send(RequestSpec(id=name, tokens=(*self.tokens, number + 1), params=params, grammar=grammar))
        while min(len(self.engine.results[name].tokens) for name in names) < WARM_STEPS:
            self.engine.step()
        tokens = self.engine.results[names[0]].tokens
        times = []
        for count in range(len(tokens), len(tokens) + STEPS):
            started = time.perf_counter()
            while len(tokens) <= count:
                self.engine.step()
            times.append((time.perf_counter() - started) * 1000)
        self.engine.run(names)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model-path")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = ["--model-path", options.model_path] if options.model_path else []
    bench = Bench(["--device", options.device, "--max-total-tokens", "16384", *model], options.streams)
    kinds = {"without": None, "with": bench.grammar}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(options.rounds + 1):
        for name in list(kinds) if number % 2 else reversed(list(kinds)):
            spent = bench.steps_ms(kinds[name])
            if number:  # the first round is the warm-up
                times[name] += spent
    for label, part in (("median", 2), ("lower quartile", 1)):
        without, masked = (statistics.quantiles(times[name], n=4)[part - 1] for name in kinds)
        print(
            f"{options.streams} streams, {label} step: {without:.2f} ms without masks, {masked:.2f} ms with: ", end=""
        )
        print(f"ratio {masked / without:.3f}")


if __name__ == "__main__":
    main()
