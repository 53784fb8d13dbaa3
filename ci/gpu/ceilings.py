"""What the device itself can do, measured in the same run as the engine: bytes per second and operations per second.

    python ceilings.py DEVICE        prints {"bytes_per_s": ..., "operations_per_s": ..., "memory_bytes": ...}

A copy within device memory counts what it reads and what it writes; a product of square bfloat16 matrices counts two
operations per multiplication. The median of several passes counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from srv_gpu.accelerator import Accelerator, load_accelerator

COPIED = 2 << 30  # bytes; far more than any cache
SIDE = 8192
PASSES = 7
REPEATS = 10  # per pass, so that the time of a launch does not count


def measure(accelerator: Accelerator) -> dict[str, float]:
    """Both ceilings, and the bytes of memory that were free before. They mean nothing on a simulated device."""
    device = accelerator.device(0)
    accelerator.module.set_device(device)
    memory = accelerator.module.mem_get_info(device)[0]
    copying = _copy_s(accelerator.module, device)
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    multiplying = _median_s(accelerator.module, lambda: torch.mm(a, b, out=product))
    return {
        "bytes_per_s": 2 * COPIED / copying,
        "operations_per_s": 2 * SIDE**3 / multiplying,
        "memory_bytes": memory,
    }


def _copy_s(module: Any, device: torch.device) -> float:
    source = torch.empty(COPIED // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return _median_s(module, lambda: target.copy_(source))


def _median_s(module: Any, work: Callable[[], object]) -> float:
    """Seconds of one call; the first pass warms up."""
    seconds = []
    for _ in range(1 + PASSES):
        module.synchronize()
        started = perf_counter()
        for _ in range(REPEATS):
            work()
        module.synchronize()
        seconds.append((perf_counter() - started) / REPEATS)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    print(json.dumps(measure(load_accelerator(sys.argv[1]))))
