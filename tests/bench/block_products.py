"""Times of native products of 4-bit blocks beside those of GGUF's Q4_0, of the same shapes, in one run.

    python tests/bench/block_products.py [--seconds 20] [--rows 1 8 32 512] [--size 1536 576]

Weights are as many as do not fit the caches, and are multiplied in turn; times are the least of all calls. The aim is a
ratio of at most 1.1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from fp8_products import least_seconds
from torch import Tensor

from srv_kernels.cases import random_gguf_rows
from srv_kernels.cpu import native_library
from srv_kernels.cpu.native_linear import GGUFWeight

BYTES = 64 << 20  # of weights in turn
ORDERED, GATHERED = "Q4_0, in another order", "Q4_0, gathered by torch"


def products(outputs: int, inputs: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    generator, order = torch.Generator().manual_seed(0), torch.randperm(inputs, generator=torch.Generator())
    count = max(1, BYTES * 2 // (outputs * inputs))

    def weights(stored: str, columns: Tensor | None = None) -> list[GGUFWeight]:
        rows = random_gguf_rows(generator, outputs, inputs, stored)
        return [GGUFWeight(rows, stored, inputs, columns=columns) for _ in range(count)]

    def gathered(weight: GGUFWeight) -> Callable[[Tensor], Tensor]:
        return lambda x: weight.linear(x.index_select(-1, order))

    plain = weights("Q4_0")
    products_by_type = {stored: [weight.linear for weight in weights(stored)] for stored in ("MXFP4", "NF4", "FP4")}
    return {
        "Q4_0": [weight.linear for weight in plain],
        ORDERED: [weight.linear for weight in weights("Q4_0", order)],
        GATHERED: [gathered(weight) for weight in plain],
        **products_by_type,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of the whole run")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--size", type=int, nargs=2, default=[1536, 576], metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    native_library.set_threads(options.threads)
    by_name = products(*options.size)
    for rows in options.rows:
        x = torch.randn(rows, options.size[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        least = dict.fromkeys(by_name, float("inf"))
        end, turn = time.monotonic() + options.seconds / len(options.rows), 0
        while time.monotonic() < end or turn == 0:
            for name, product in by_name.items():
                chosen = product if rows == 1 else product[turn % len(product) :][:1]
                least[name] = min(least[name], least_seconds(chosen, x))
            turn += 1
        for name, seconds in least.items():
            print(f"{rows:4} rows  {name:25} {seconds * 1e6:9.0f} µs  {seconds / least['Q4_0']:5.2f} of Q4_0")


if __name__ == "__main__":
    main()
