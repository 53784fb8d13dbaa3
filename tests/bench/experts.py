"""How near the native kernels of mixtures of experts come to what this machine can do, in Qwen3-30B-A3B's proportions.

    python tests/bench/experts.py [--threads 2] [--rounds 5] [--stored bfloat16 int8 Q8_0 Q4_0] [--json FILE]
    python tests/bench/experts.py --threads 1 --clock cpu     on a machine with other work

A layer has 64 experts, of which each token uses 8; the hidden size and that of an expert are half of the model's. The
layers run in turn, so that their weights come from memory. The floor of few tokens is the time to read the weights of
the experts that they use, at the bandwidth of `peers/ceilings.c`. That of many tokens is the time of one dense product
with as many operations, by the existing kernels for weights stored alike. Choices are random, so that experts are used
equally; the time of the router is given beside them.

`--clock cpu` counts the processor time of the calling thread. Ceilings are then those of the existing kernels: the
floor of few tokens is the time of dense products of one row that read as many bytes, in turn from as many layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import torch
from machine import Ceilings, describe, measure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from srv_kernels import expert_reference
from srv_kernels.cases import random_gguf_rows
from srv_kernels.cpu import native_experts, native_linear
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.native_experts import NativeExperts, PackedMatrices
from srv_kernels.cpu.native_library import set_threads

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 1024, 384, 64, 8
LAYERS = 4  # 75 million weights each: more than a processor's caches hold
STORED = ("bfloat16", "int8", "Q8_0", "Q4_0")
DECODES, PREFILL = (1, 4, 16), 512
ROUTING = (TOP_K, "softmax", True, 1, 1, 1.0)
CLOCKS = {"wall": perf_counter, "cpu": thread_time}
Kernel = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Figure:
    """Milliseconds of one layer for some tokens, and of what bounds it: `reading` its experts, or a `dense` product."""

    stored: str
    tokens: int
    milliseconds: float
    floor: float
    bound: str

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.floor


@dataclass(frozen=True)
class Router:
    """Microseconds of the choice for some tokens: native, and by torch's operators."""

    tokens: int
    native: float
    torch: float


def _matrices(stored: str, outputs: int, inputs: int, arena: HugePageArena) -> PackedMatrices:
    if stored == "bfloat16":
        return native_experts.pack_floats(torch.randn(EXPERTS, outputs, inputs).bfloat16() / 32, arena=arena)
    if stored == "int8":
        weight = torch.randint(-127, 128, (EXPERTS, outputs, inputs), dtype=torch.int8)
        return native_experts.pack_int8(weight, torch.full((EXPERTS, outputs), 1 / 4096), arena)
    rows = random_gguf_rows(torch.Generator().manual_seed(1), EXPERTS * outputs, inputs, stored)
    return native_experts.pack_gguf(rows.view(EXPERTS, outputs, -1), stored, inputs, arena)


def layers(stored: str) -> list[NativeExperts]:
    """The experts of all layers, in one arena as after loading."""
    arena = HugePageArena()
    sizes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [NativeExperts(*(_matrices(stored, *size, arena) for size in sizes), "silu") for _ in range(LAYERS)]


def dense(stored: str, outputs: int, arena: HugePageArena | None = None) -> Kernel:
    """One product with a matrix [outputs, HIDDEN], by the existing kernels."""
    if stored == "bfloat16":
        return native_linear.linear(torch.randn(outputs, HIDDEN).bfloat16() / 32, None, arena)
    if stored == "int8":
        weight = torch.randint(-127, 128, (outputs, HIDDEN), dtype=torch.int8)
        return native_linear.Int8WeightLinear(weight, torch.full((outputs,), 1 / 4096), arena=arena)
    rows = random_gguf_rows(torch.Generator().manual_seed(1), outputs, HIDDEN, stored)
    return native_linear.GGUFWeight(rows, stored, HIDDEN, arena).linear


def _choices(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return native_experts.route_experts(logits, None, *ROUTING)


@dataclass(frozen=True)
class Bench:
    """Measures with one clock. `ceilings`: None if the floors are times of other kernels."""

    clock: Callable[[], float]
    rounds: int
    ceilings: Ceilings | None

    def seconds(self, work: Callable[[], object], least: float = 0.05) -> float:
        """Median seconds of a call, over rounds of at least `least` seconds."""
        work()
        start = self.clock()
        work()
        calls = max(1, int(least / max(self.clock() - start, 1e-7)))
        spent = []
        for _ in range(self.rounds):
            start = self.clock()
            for _ in range(calls):
                work()
            spent.append((self.clock() - start) / calls)
        return statistics.median(spent)

    def figures(self, stored: str) -> list[Figure]:
        model = layers(stored)
        return [self._figure(stored, model, tokens) for tokens in (*DECODES, PREFILL)]

    def _figure(self, stored: str, model: Sequence[NativeExperts], tokens: int) -> Figure:
        x = torch.randn(tokens, HIDDEN).bfloat16()
        choices = [_choices(tokens, layer) for layer in range(LAYERS)]

        def step() -> None:
            for experts, (ids, weights) in zip(model, choices, strict=True):
                experts(x, ids, weights)

        seconds = self.seconds(step) / LAYERS
        if tokens == PREFILL:
            floor, bound = self.seconds(partial(dense(stored, 3 * INTERMEDIATE * TOP_K), x)), "dense product"
        else:
            used = round(statistics.mean(len(ids.unique()) for ids, _ in choices))
            floor, bound = self._reading(stored, used, used * model[0].bytes_per_expert), "reading"
        return Figure(stored, tokens, seconds * 1e3, floor * 1e3, bound)

    def _reading(self, stored: str, experts: int, size: int) -> float:
        if self.ceilings is not None:
            return size / self.ceilings.read * 1e-9
        arena, x = HugePageArena(), torch.randn(1, HIDDEN).bfloat16()
        turn = [dense(stored, 3 * INTERMEDIATE * experts, arena) for _ in range(LAYERS)]
        return self.seconds(lambda: [kernel(x) for kernel in turn]) / LAYERS

    def router(self, tokens: int) -> Router:
        logits = torch.randn(tokens, EXPERTS)
        native = self.seconds(lambda: native_experts.route_experts(logits, None, *ROUTING))
        plain = self.seconds(lambda: expert_reference.route_experts(logits, None, *ROUTING))
        return Router(tokens, native * 1e6, plain * 1e6)


def show(figures: Sequence[Figure], routers: Sequence[Router], machine: Mapping[str, object]) -> None:
    console = Console(width=100)
    console.print(machine)
    table = Table("stored", "tokens", "ms per layer", "floor, ms", "÷ floor", "bound")
    for figure in figures:
        values = (f"{figure.milliseconds:.3f}", f"{figure.floor:.3f}", f"{figure.ratio:.2f}")
        table.add_row(figure.stored, str(figure.tokens), *values, figure.bound)
    console.print(table)
    choice = Table("router: tokens", "native, µs", "torch, µs")
    for router in routers:
        choice.add_row(str(router.tokens), f"{router.native:.1f}", f"{router.torch:.1f}")
    console.print(choice)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stored", nargs="+", default=list(STORED), choices=STORED)
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread: use --threads 1")
    ceilings = measure(options.threads) if options.clock == "wall" else None
    if options.clock == "wall" and ceilings is None:
        parser.error("the ceilings of this machine need a C compiler with OpenMP: install gcc, or use --clock cpu")
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    bench = Bench(CLOCKS[options.clock], options.rounds, ceilings)
    with torch.inference_mode():
        figures = [figure for stored in options.stored for figure in bench.figures(stored)]
        routers = [bench.router(tokens) for tokens in (*DECODES, PREFILL)]
    machine = describe() | {"ceilings": None if ceilings is None else asdict(ceilings)}
    show(figures, routers, machine)
    if options.json is not None:
        rows = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        content = {"machine": machine, "experts": rows, "router": [asdict(router) for router in routers]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
