"""Profile the steps of this server without HTTP, in an engine in this process.

    python step_profile.py --points 1 4 -- --max-total-tokens 20480 ...      (arguments of `srv launch`)

Prints JSON, one entry per load; `race.py` runs it when the servers have stopped. Complete loads are timed first, in an
engine without profiling; then single steps of a second engine. A captured step replays all its kernels in one call: the
time of that call is measured and divided among the kinds of kernels in proportion to the time that each takes alone.
Running kernels alone leaves wrong keys and values behind, so the outputs after it are not valid.
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

from bench_loads import WORKLOADS, Prompts, Workload
from kernel_calls import KernelCall, KernelCalls
from stepping import Stepping, request_of

from srv.testing.engine import LocalEngine

STEPS = 16  # in the middle of the output; the median counts
PASSES = 3  # of a load, or of a prompt
PRODUCTS = (
    *("srv_linear", "srv_int8_weight_linear", "srv_w8a8_linear", "srv_gguf_linear", "srv_fp8_linear"),
    "srv_experts",
)
SAMPLING = ("srv_most_likely", "srv_draw")
KINDS: dict[str, Callable[[str], bool]] = {
    "products": lambda name: name in PRODUCTS,
    "attention": lambda name: name == "srv_attention",
    "other_kernels": lambda name: name not in (*PRODUCTS, "srv_attention", *SAMPLING),
}


@dataclass(frozen=True)
class Part:
    """Milliseconds of one step; `python` is the rest: planning, inputs, torch operators, results."""

    step: float
    products: float
    attention: float
    other_kernels: float
    sampling: float
    python: float


@contextmanager
def _engine(launch: Sequence[str]) -> Iterator[LocalEngine]:
    """An engine whose loaded objects are frozen for the garbage collector, as in the server's engine process."""
    with LocalEngine.launch(launch) as engine:
        gc.freeze()
        try:
            yield engine
        finally:
            gc.unfreeze()


def load_s(engine: LocalEngine, workload: Workload, prompts: Prompts) -> float:
    """Seconds of a whole load in the engine's own loop."""
    _warm(engine, workload, prompts)
    return statistics.median([_pass(engine, workload, prompts) for _ in range(1 + PASSES)][1:])


def _pass(engine: LocalEngine, workload: Workload, prompts: Prompts) -> float:
    sent = [request_of(number, tokens, workload.output) for number, tokens in enumerate(prompts.draw(workload))]
    begun = perf_counter()
    engine.generate(sent)
    return perf_counter() - begun


def _warm(engine: LocalEngine, workload: Workload, prompts: Prompts) -> None:
    if workload.shared:
        engine.generate([request_of(0, prompts.prefix(workload), 1)])
    else:
        engine.generate([request_of(0, prompts.draw(workload)[0], min(workload.output, 8))])


class Profiler:
    """Measures the parts of steps. The engine must have been built while `calls` was entered."""

    def __init__(self, engine: LocalEngine, calls: KernelCalls) -> None:
        self._engine, self._calls = engine, calls
        self._steps = Stepping(engine)
        self._sampling_s = 0.0
        sampler = self._steps.runner._sampler
        draw = sampler.sample

        def timed(*arguments: object) -> object:
            kernels, begun = self._calls.spent.copy(), perf_counter()
            drawn = draw(*arguments)
            self._sampling_s += perf_counter() - begun
            self._calls.spent = kernels  # kernels of sampling count as sampling
            return drawn

        sampler.sample = timed

    def parts(self, workload: Workload, prompts: Prompts) -> Part:
        """The parts of a step of this load."""
        _warm(self._engine, workload, prompts)
        return self._prefill(workload, prompts) if workload.output == 1 else self._decode(workload, prompts)

    def _prefill(self, workload: Workload, prompts: Prompts) -> Part:
        """All steps of the prompts, added up."""
        parts = []
        for _ in range(PASSES):
            self._steps.add(prompts.draw(workload), workload.output)
            parts.append(self._timed(lambda: self._until_sampled(workload.requests)))
            self._steps.end(flush=False)
        return _median(parts)

    def _until_sampled(self, rows: int) -> None:
        while rows:
            rows -= sum(len(row.tokens) for row in self._steps.step().rows)

    def _decode(self, workload: Workload, prompts: Prompts) -> Part:
        self._steps.add(prompts.draw(workload), workload.output)
        self._steps.until_all_decode(workload.requests)
        for _ in range(max(0, workload.output // 2 - STEPS // 2)):
            self._steps.step()
        parts = [self._timed(self._steps.step) for _ in range(STEPS)]
        seen: list[KernelCall] = []
        self._calls.on_call = seen.append
        self._steps.step()
        self._calls.on_call = None
        alone = {
            kind: self._calls.time_alone(calls, STEPS)
            for kind, fits in KINDS.items()
            if (calls := [call for call in seen if fits(call.name)])
        }
        self._steps.end(flush=False)
        return _divided(_median(parts), alone)

    def _timed(self, work: Callable[[], object]) -> Part:
        """Time by kind of kernel; a replayed graph counts as `other_kernels`, because its kernels are not timed."""
        self._calls.spent.clear()
        self._sampling_s, begun = 0.0, perf_counter()
        work()
        whole = perf_counter() - begun
        kinds = {kind: sum(s for name, s in self._calls.spent.items() if fits(name)) for kind, fits in KINDS.items()}
        rest = whole - sum(kinds.values()) - self._sampling_s
        seconds = {"step": whole, **kinds, "sampling": self._sampling_s, "python": rest}
        return Part(**{name: 1e3 * second for name, second in seconds.items()})


def _divided(part: Part, alone: dict[str, float]) -> Part:
    """Divide the time of all kernels among their kinds, in proportion to the time that each takes alone."""
    together = part.products + part.attention + part.other_kernels
    total = sum(alone.values())
    kinds = {kind: together * alone.get(kind, 0.0) / total for kind in KINDS} if total else {}
    return Part(**{**asdict(part), **kinds})


def _median(parts: Sequence[Part]) -> Part:
    """The median of each part; `python` is computed from the others, so that they add up."""
    middle = {name: statistics.median(asdict(part)[name] for part in parts) for name in asdict(parts[0])}
    named = sum(middle[name] for name in (*KINDS, "sampling"))
    return Part(**{**middle, "python": middle["step"] - named})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=list(range(len(WORKLOADS))), help="indices of loads")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("launch", nargs="*")
    options = parser.parse_args()
    prompts = Prompts(options.vocab, seed=2)
    workloads = [WORKLOADS[point] for point in options.points]
    with _engine(options.launch) as engine:
        loads = [load_s(engine, workload, prompts) for workload in workloads]
    with KernelCalls() as calls, _engine(options.launch) as engine:
        profiler = Profiler(engine, calls)
        parts = [profiler.parts(workload, prompts) for workload in workloads]
    profiles = {
        workload.name: {"parts_ms": asdict(part), "load_s": seconds}
        for workload, part, seconds in zip(workloads, parts, loads, strict=True)
    }
    sys.stdout.write(json.dumps(profiles) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
