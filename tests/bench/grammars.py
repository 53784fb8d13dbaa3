"""What grammars cost per step: 16 decoding requests with and without masks, in the engine that `srv launch` starts.

    python tests/bench/grammars.py [--rounds 5] [--streams 16] [--model-path PATH]
    python tests/bench/grammars.py --jumps      # what jump-forward saves: whole outputs by the schema of an extraction

A round times the same number of steps of both, in turn forwards and backwards, in one warm engine. Printed are the
median and the lower quartile of each, which other work on the machine changes less, and their ratios. The schema has a
long array of objects, so that no request ends before its length. With `--jumps`, times are those of whole outputs, also
in seconds of the processor, which other work changes least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from unittest import mock

import msgspec

from srv.engine import grammars
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


EXTRACT = "John Smith is 42 years old and lives at 12 Main Street, Springfield, IL 62701. As JSON:\n"
EXTRACTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "city": {"type": "string", "maxLength": 40},
                "postal_code": {"type": "string", "maxLength": 10},
            },
            "required": ["street", "city", "postal_code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}


class Bench:
    """One engine, and the requests that are run in it."""

    def __init__(self, arguments: Sequence[str], streams: int) -> None:
        slots = str(max(streams, 16))  # as many rows are captured, and a jump takes several of them
        self.engine = LocalEngine.launch([*arguments, "--max-running-requests", slots, "--disable-radix-cache"])
        model = self.engine.context.model
        text = load_text_processor(model)
        vocabulary = text.vocabulary()
        assert vocabulary is not None, "the model's tokenizer has no bytes per token"
        self.engine.send(vocabulary)
        backend = make("llguidance", GrammarContext(vocabulary, model.vocab_size, model.end_tokens))
        source, extraction = (from_json_schema(schema, param="bench") for schema in (SCHEMA, EXTRACTION))
        self.grammar = Grammar(backend.translate(source, JsonSpacing(none=True)))
        self.extractions = {
            "compact": Grammar(backend.translate(extraction, JsonSpacing(none=True))),
            "any spacing": Grammar(backend.translate(extraction, JsonSpacing())),
        }
        self.decode = text.decode
        self.tokens, self.text_to_extract = text.encode(PROMPT), text.encode(EXTRACT)
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

    def outputs(self, grammar: Grammar, *, jumps: bool) -> tuple[float, float, int, list[list[int]]]:
        """Whole outputs: seconds, processor seconds, steps, and the tokens of each."""
        self.runs += 1
        params = SamplingParams(max_tokens=200, temperature=0.7, seed=1)
        requests = [
            RequestSpec(
                id=f"{self.runs} {number}",
                tokens=(*self.text_to_extract, number + 1),
                params=msgspec.structs.replace(params, seed=number),
                grammar=grammar,
            )
            for number in range(self.streams)
        ]
        before = self.engine.stats().steps
        began, worked = time.perf_counter(), time.process_time()
        with mock.patch.object(grammars, "may_jump", return_value=jumps):
            results = self.engine.generate(requests)
        seconds, work = time.perf_counter() - began, time.process_time() - worked
        return seconds, work, self.engine.stats().steps - before, [result.tokens for result in results]


def print_jumps(bench: Bench, rounds: int) -> None:
    """Outputs with and without jumps, in turn forwards and backwards."""
    for name, grammar in bench.extractions.items():
        by_jumps: dict[bool, list[tuple[float, float, int, list[list[int]]]]] = {True: [], False: []}
        for number in range(rounds + 1):
            for jumps in (True, False) if number % 2 else (False, True):
                one = bench.outputs(grammar, jumps=jumps)
                if number:  # the first round is the warm-up
                    by_jumps[jumps].append(one)
        same = all(one[3] == by_jumps[False][0][3] for one in by_jumps[False] + by_jumps[True])
        print(f"{name}, {bench.streams} streams: {sum(map(len, by_jumps[True][0][3]))} tokens, equal outputs: {same}")
        print(f"  first output: {bench.decode(by_jumps[True][0][3][0])!r}")
        for title, column in (("steps", 2), ("seconds", 0), ("processor seconds", 1)):
            without, jumped = (statistics.median(one[column] for one in by_jumps[jumps]) for jumps in (False, True))
            print(f"  {title}: {without:.4g} without jumps, {jumped:.4g} with: ratio {without / jumped:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model-path")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jumps", action="store_true")
    options = parser.parse_args()
    model = ["--model-path", options.model_path] if options.model_path else []
    bench = Bench(["--device", options.device, "--max-total-tokens", "16384", *model], options.streams)
    if options.jumps:
        print_jumps(bench, options.rounds)
        return
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
