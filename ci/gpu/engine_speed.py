"""Time decode and prefill steps of one engine, in this process and without HTTP. One configuration per process.

    python engine_speed.py --device cuda --model FOLDER --attention triton [--eager] --batches 1 16 --prompt 1024
        --prefill 8192 --out FILE

Appends one line of JSON per measurement to FILE as soon as it is known; or one with the reason, and ends with status 3,
if srv refuses the configuration on this machine. With --simulated the same steps run, but no time is written: that of a
simulated device means nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import TextIO

from outcomes import STATUS_PASSED_OVER

from srv.errors import SrvError
from srv.io.messages import Abort
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams

STEPS = 48  # timed decode steps
WARM_UP = 8
CHUNK = 8192
PAGE = 128  # tokens; the largest page that a row may fill only in part
VOCABULARY = 64  # prompts take the tokens below: every model here has them


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement. kind: "decode" (seconds per step) or "prefill" (seconds of the prompt, until its first token).

    size: rows, or tokens of the prompt. context: mean tokens per row whose keys and values a step reads. replayed:
    whether the timed steps replayed graphs. seconds: None on a simulated device.
    """

    attention: str
    graphs: bool
    kind: str
    size: int
    context: float
    replayed: bool
    seconds: float | None


def output_tokens(rows: int, prompt: int) -> int:
    """Tokens that a row may need to have generated when the last one has been timed.

    While the last prompts are computed, the first rows may decode already.
    """
    return 2 * -(-rows * prompt // CHUNK) + WARM_UP + STEPS + 8


class Timing:
    """Sends requests to an engine and times its steps, with steps overlapping as in the server."""

    def __init__(self, engine: LocalEngine, simulated: bool) -> None:
        self._engine, self._simulated = engine, simulated
        self._random = random.Random(1)
        self._requests = 0
        self.warm_up, self.steps = (1, 2) if simulated else (WARM_UP, STEPS)

    def prefill_s(self, tokens: int) -> float:
        """Seconds from sending one prompt to its first token; the second prompt counts."""
        for _ in range(2):
            request = self._request(tokens, 1)
            started = perf_counter()
            self._engine.generate([request])
            seconds = perf_counter() - started
        return seconds

    def decode(self, rows: int, prompt: int) -> tuple[float, float, bool]:
        """(seconds per step, mean context, whether all were replayed) once all rows decode."""
        requests = [self._request(prompt, output_tokens(rows, prompt)) for _ in range(rows)]
        for request in requests:
            self._engine.send(request)
        names = [request.id for request in requests]
        while min(self._tokens(names)) < 1 + self.warm_up:
            self._engine.step()
        before, first, started = self._engine.stats(), sum(self._tokens(names)), perf_counter()
        while sum(self._tokens(names)) < first + rows * self.steps:
            self._engine.step()
        seconds, generated = perf_counter() - started, sum(self._tokens(names))
        after = self._engine.stats()
        steps = (generated - first) / rows
        context = prompt + (first + generated) / 2 / rows
        self._engine.send(Abort(None))
        self._engine.run(names)
        return seconds / steps, context, after.eager_steps == before.eager_steps

    def _tokens(self, names: Sequence[str]) -> list[int]:
        return [len(self._engine.results[name].tokens) for name in names]

    def _request(self, tokens: int, output: int) -> RequestSpec:
        """A random prompt, which no other begins like, and an output that ends by its length."""
        self._requests += 1
        prompt = tuple(self._random.randrange(3, VOCABULARY) for _ in range(tokens))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        return RequestSpec(id=f"request {self._requests}", tokens=prompt, params=params)


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The arguments of `srv launch`: a pool for the largest load, and graphs of exactly the measured batches."""
    largest = max(options.batches, default=1)
    tokens_per_row = options.prompt + output_tokens(largest, options.prompt) + PAGE
    pool = max(largest * tokens_per_row, options.prefill + PAGE)
    graphs = ["--graph-batch-sizes", *map(str, options.batches)] if options.batches else []
    return [
        *("--device", options.device, "--model-path", str(options.model), "--dtype", "bfloat16"),
        *("--attention-backend", options.attention, "--load-format", options.load_format),
        *("--max-running-requests", str(largest), "--max-total-tokens", str(pool)),
        *("--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"),
        *(["--disable-graphs"] if options.eager else graphs),
    ]


def measure(options: argparse.Namespace) -> None:
    """All measurements of one configuration, unless --seconds are over before the next one begins."""
    started = monotonic()
    with LocalEngine.launch(arguments_of(options)) as engine, options.out.open("a", encoding="utf-8") as out:
        gc.freeze()
        timing = Timing(engine, options.simulated)
        graphs = not options.eager
        for rows in options.batches:
            if monotonic() - started > options.seconds:
                print(f"no time was left for batch {rows}", flush=True)
                return
            seconds, context, replayed = timing.decode(rows, options.prompt)
            _write(out, Measured(options.attention, graphs, "decode", rows, context, replayed, seconds), options)
        if options.prefill and monotonic() - started <= options.seconds:
            seconds = timing.prefill_s(options.prefill)
            size = options.prefill
            _write(out, Measured(options.attention, graphs, "prefill", size, size, False, seconds), options)


def _write(out: TextIO, measured: Measured, options: argparse.Namespace) -> None:
    line = json.dumps(asdict(measured) | ({"seconds": None} if options.simulated else {}))
    for file in (out, sys.stdout):
        print(line, file=file, flush=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--attention", required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--simulated", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    try:
        measure(options)
    except SrvError as error:
        line = json.dumps({"refused": " ".join(str(error).split())})
        with options.out.open("a", encoding="utf-8") as out:
            print(line, file=out)
        return STATUS_PASSED_OVER
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
