"""Times of latent attention on the CPU's native kernel with its two forms in turn, in one run.

    python tests/bench/latent_prompts.py [--heads 16] [--dtype bfloat16 float32] [--rows 256/256 64/1024] [--times 5]

A row is given as new tokens / tokens in all, of DeepSeek's sizes (512 + 64 elements per token, keys and values of 128);
16 heads are those of DeepSeek-V2-Lite, or of one of eight ranks of DeepSeek-V3. Times are the least of all turns, and
of one thread's time on its core, so that other processes disturb less. The machine's load is printed first.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from srv.platform.interface import AttentionBatch, BackendContext
from srv.platform.pools import plain_pool
from srv.specs import AttentionLayer, KVLayout, Latent, LatentDims
from srv_cpu.latent_forms import ABSORB_PREFILL
from srv_cpu.native_latent import NativeLatentAttention
from srv_kernels.cpu import native_library
from srv_kernels.cpu.library import load

DIMS = LatentDims(512, 128, 64, 128)
PAGE = 16
ROWS = ("16/16", "64/64", "256/256", "1024/1024", "64/1024", "128/1024", "256/1024", "256/4096", "1024/4096")


class Forms:
    """The same layer with both forms."""

    def __init__(self, heads: int, dtype: torch.dtype, tokens: int) -> None:
        place, name = torch.device("cpu"), str(dtype).removeprefix("torch.")
        layout = KVLayout(Latent((0,), DIMS.latent_dim, DIMS.rope_dim), PAGE, name)
        pool = plain_pool(layout, -(-tokens // PAGE), place)
        for tensor in pool.all():
            tensor.normal_()
        self.heads, self.dtype = heads, dtype
        self.layer = AttentionLayer(0, heads, 1, 192, 192**-0.5, latent=DIMS)
        up = (torch.randn(heads, DIMS.key_dim + DIMS.value_dim, DIMS.latent_dim) * DIMS.latent_dim**-0.5).to(dtype)

        def backend(**arguments: bool) -> NativeLatentAttention:
            context: Any = BackendContext(None, place, pool, 1, None, arguments)  # type: ignore[arg-type]
            native = NativeLatentAttention(context)
            native.prepare(self.layer, up)
            return native

        self.absorbed, self.materialised = backend(**{ABSORB_PREFILL: True}), backend()
        self.materialised._fewest = lambda dims: 1  # type: ignore[assignment]  # any row, to compare

    def least(self, queries: int, keys: int, times: int) -> tuple[float, float]:
        """Seconds of one layer, absorbed and materialised."""
        q = torch.randn(queries, self.heads, DIMS.key_dim + DIMS.rope_dim).to(self.dtype)
        k, v = (torch.randn(queries, 1, dim).to(self.dtype) for dim in (DIMS.latent_dim, DIMS.rope_dim))
        table = torch.arange(1, -(-keys // PAGE) + 1, dtype=torch.int32)[None]
        least = [float("inf")] * 2
        for _ in range(times):
            for number, form in enumerate((self.absorbed, self.materialised)):
                plan = form.plan(AttentionBatch([queries], [keys], table))
                start = time.process_time()
                form.forward(self.layer, q, k, v, plan)
                least[number] = min(least[number], time.process_time() - start)
        return least[0], least[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="NEW/ALL")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    native_library.set_threads(1)
    sizes = [tuple(int(number) for number in row.split("/")) for row in options.rows]
    load1, load5, _ = os.getloadavg()
    print(f"{load().isa}, {options.heads} heads, one thread; load {load1:.1f} (1 minute), {load5:.1f} (5 minutes)")
    for name in options.dtype:
        forms = Forms(options.heads, getattr(torch, name), max(keys for _, keys in sizes))
        for queries, keys in sizes:
            absorbed, materialised = forms.least(queries, keys, options.times)
            print(
                f"{name:8} {queries:5} of {keys:5} tokens: absorbed {absorbed * 1e3:8.1f} ms, materialised "
                f"{materialised * 1e3:8.1f} ms, {absorbed / materialised:5.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
