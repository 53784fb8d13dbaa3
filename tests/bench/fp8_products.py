"""Times of the native FP8 product beside those of GGUF's Q8_0, int8 and bfloat16, of the same shapes, in one run.

    python tests/bench/fp8_products.py [--seconds 20] [--rows 1 4 64] [--size 4096 4096]

Weights are as many as do not fit the caches, and are multiplied in turn; times are the least of all calls. For few
rows, the aim is a ratio to Q8_0 of at most 1.1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from srv_kernels.cases import random_fp8, random_gguf_rows
from srv_kernels.cpu import native_library, native_linear
from srv_kernels.cpu.native_fp8 import Fp8Weight

BYTES = 192 << 20  # of weights in turn


def products(outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    generator, count = torch.Generator().manual_seed(0), max(1, BYTES // (outputs * inputs))
    fp8, rows = random_fp8(generator, outputs, inputs), random_gguf_rows(generator, outputs, inputs, "Q8_0")
    int8 = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    of_row, of_block = torch.full((outputs, 1), 1e-4), torch.full((-(-outputs // 128), -(-inputs // 128)), 1e-4)
    return {
        "Q8_0": [native_linear.GGUFWeight(rows, "Q8_0", inputs).linear for _ in range(count)],
        "FP8, a scale per output": [Fp8Weight(fp8, of_row, 1, inputs).linear for _ in range(count)],
        "FP8, blocks of 128 x 128": [Fp8Weight(fp8, of_block, 128, 128).linear for _ in range(count)],
        "int8, weights only": [native_linear.Int8WeightLinear(int8, of_row[:, 0]) for _ in range(count)],
        "unquantized": [native_linear.linear(fp8.to(dtype), None) for _ in range(-(-count // 2))],
    }


def least_seconds(product: list[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Of one product. Other processes disturb some of the calls only."""
    times: list[float] = []
    for multiply in product:
        begin = time.perf_counter()
        multiply(x)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of the whole run")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 4096], metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    native_library.set_threads(options.threads)
    by_name = products(*options.size, torch.bfloat16)
    for rows in options.rows:
        x = torch.randn(rows, options.size[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        least = dict.fromkeys(by_name, float("inf"))
        end = time.monotonic() + options.seconds / len(options.rows)
        while time.monotonic() < end:
            for name, product in by_name.items():
                least[name] = min(least[name], least_seconds(product, x))
        for name, seconds in least.items():
            print(f"{rows:4} rows  {name:25} {seconds * 1e6:9.0f} µs  {seconds / least['Q8_0']:5.2f} of Q8_0")


if __name__ == "__main__":
    main()
