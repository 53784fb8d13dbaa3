"""Where this server's step spends its time, without HTTP: one engine in this process, part by part.

    python step_profile.py --points 1 4 -- --max-total-tokens 20480 ...      what `srv launch` would be given

Prints JSON, one entry a load; `race.py` runs it when the servers have stopped. Whole loads are timed first, in an
engine that nothing watches; the steps of a second one are then taken apart. The kernels of a captured step run as one,
from C++: what they take together is measured in the step, and divided as the kinds take when each is run alone; which
leaves wrong keys and values behind, so that only times may be read of what follows.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_loads import POINTS, Point, Prompts
from kernel_calls import KernelCall, KernelCalls
from stepping import Stepping, request_of

from srv.testing.engine import LocalEngine

STEPS = 16  # of which the median counts, around half of the output
PASSES = 3  # of a load, or of a prompt
PRODUCTS = ("srv_linear", "srv_scaled_linear", "srv_byte_linear", "srv_block_linear")
SAMPLING = ("srv_most_likely", "srv_draw")
KINDS: dict[str, Callable[[str], bool]] = {
    "products": lambda name: name in PRODUCTS,
    "attention": lambda name: name == "srv_attention",
    "other_kernels": lambda name: name not in (*PRODUCTS, "srv_attention", *SAMPLING),
}


@dataclass(frozen=True)
class Part:
    """Milliseconds of one step; `python` is what is left: planning, inputs, torch's operators, results."""

    step: float
    products: float
    attention: float
    other_kernels: float
    sampling: float
    python: float


@contextmanager
def _engine(launch: Sequence[str]) -> Iterator[LocalEngine]:
    """As a server's own process keeps it: what is loaded by then is left out of garbage collections."""
    with LocalEngine.launch(launch) as engine:
        gc.freeze()
        try:
            yield engine
        finally:
            gc.unfreeze()


def load_s(engine: LocalEngine, point: Point, prompts: Prompts) -> float:
    """Seconds of a whole load, as the engine's own loop runs it."""
    _warm(engine, point, prompts)
    return statistics.median([_pass(engine, point, prompts) for _ in range(1 + PASSES)][1:])


def _pass(engine: LocalEngine, point: Point, prompts: Prompts) -> float:
    sent = [request_of(number, tokens, point.output) for number, tokens in enumerate(prompts.draw(point))]
    begun = perf_counter()
    engine.generate(sent)
    return perf_counter() - begun


def _warm(engine: LocalEngine, point: Point, prompts: Prompts) -> None:
    if point.shared:
        engine.generate([request_of(0, prompts.prefix(point), 1)])
    else:
        engine.generate([request_of(0, prompts.draw(point)[0], min(point.output, 8))])


class Profiler:
    """Takes steps apart. The engine must have been built under `calls`."""

    def __init__(self, engine: LocalEngine, calls: KernelCalls) -> None:
        self._engine, self._calls = engine, calls
        self._steps = Stepping(engine)
        self._sampled = 0.0
        sampler = self._steps.runner._sampler
        draw = sampler.sample

        def timed(*given: object) -> object:
            kernels, begun = self._calls.spent.copy(), perf_counter()
            drawn = draw(*given)
            self._sampled += perf_counter() - begun
            self._calls.spent = kernels  # those of sampling are sampling's
            return drawn

        sampler.sample = timed

    def parts(self, point: Point, prompts: Prompts) -> Part:
        """Those of a step."""
        _warm(self._engine, point, prompts)
        return self._prefill(point, prompts) if point.output == 1 else self._decode(point, prompts)

    def _prefill(self, point: Point, prompts: Prompts) -> Part:
        """All steps of the prompts together, as if they were one."""
        found = []
        for _ in range(PASSES):
            self._steps.add(prompts.draw(point), point.output)
            found.append(self._timed(lambda: self._until_sampled(point.requests)))
            self._steps.end(flush=False)
        return _median(found)

    def _until_sampled(self, rows: int) -> None:
        while rows:
            rows -= sum(len(row.tokens) for row in self._steps.step().rows)

    def _decode(self, point: Point, prompts: Prompts) -> Part:
        self._steps.add(prompts.draw(point), point.output)
        self._steps.until_all_decode(point.requests)
        for _ in range(max(0, point.output // 2 - STEPS // 2)):
            self._steps.step()
        found = [self._timed(self._steps.step) for _ in range(STEPS)]
        seen: list[KernelCall] = []
        self._calls.see = seen.append
        self._steps.step()
        self._calls.see = None
        alone = {
            kind: self._calls.alone(calls, STEPS)
            for kind, fits in KINDS.items()
            if (calls := [call for call in seen if fits(call.name)])
        }
        self._steps.end(flush=False)
        return _divided(_median(found), alone)

    def _timed(self, work: Callable[[], object]) -> Part:
        """Kernels by their kinds; those of a tape, which are not known apart, are all `other_kernels`."""
        self._calls.spent.clear()
        self._sampled, begun = 0.0, perf_counter()
        work()
        whole = perf_counter() - begun
        kinds = {kind: sum(s for name, s in self._calls.spent.items() if fits(name)) for kind, fits in KINDS.items()}
        rest = whole - sum(kinds.values()) - self._sampled
        seconds = {"step": whole, **kinds, "sampling": self._sampled, "python": rest}
        return Part(**{name: 1e3 * each for name, each in seconds.items()})


def _divided(part: Part, alone: dict[str, float]) -> Part:
    """The kernels' time, among the kinds as they take alone."""
    together = part.products + part.attention + part.other_kernels
    total = sum(alone.values())
    kinds = {kind: together * alone.get(kind, 0.0) / total for kind in KINDS} if total else {}
    return Part(**{**asdict(part), **kinds})


def _median(found: Sequence[Part]) -> Part:
    """That of each part; what is left is reckoned anew, so that they add up."""
    middle = {name: statistics.median(asdict(part)[name] for part in found) for name in asdict(found[0])}
    named = sum(middle[name] for name in (*KINDS, "sampling"))
    return Part(**{**middle, "python": middle["step"] - named})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=list(range(len(POINTS))), help="by their place")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("launch", nargs="*")
    options = parser.parse_args()
    prompts = Prompts(options.vocab, seed=2)
    points = [POINTS[each] for each in options.points]
    with _engine(options.launch) as engine:
        loads = [load_s(engine, point, prompts) for point in points]
    with KernelCalls() as calls, _engine(options.launch) as engine:
        profiler = Profiler(engine, calls)
        parts = [profiler.parts(point, prompts) for point in points]
    found = {
        point.name: {"parts_ms": asdict(part), "load_s": seconds}
        for point, part, seconds in zip(points, parts, loads, strict=True)
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
