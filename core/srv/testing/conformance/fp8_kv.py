"""L2: attention over KV pools of 8-bit floats, compared with float64 over keys and values that are rounded likewise.

The scales of keys and values differ, and differ between layers; every vector has an element beyond the range of the
format.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from srv.dtypes import FLOAT8, KVScales
from srv.platform.pools import is_float8
from srv.testing.conformance.attention import check_typical, run_each
from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.setups import (
    MAX_HEAD_SIZES,
    AttentionSetup,
    allocate_pool,
    declared_dtypes,
    dtype_of,
    select_setups,
)

LIMITS = (KVScales(3.5, 7.0), KVScales(1.75, 0.875))  # what a layer's keys and values are limited to, below `OUTLIER`


def fp8_kv(kit: Kit) -> str:
    """Pools of both formats, with and without shared KV heads, in every declared dtype that supports it."""
    summaries: list[str] = []
    for name in FLOAT8:
        refusals: list[str] = []
        for kv_heads in (4, 2):
            for dtype in declared_dtypes(kit):
                try:
                    chosen = select_setups(
                        kit, 4, kv_heads, dtypes=(dtype,), max_head_sizes=MAX_HEAD_SIZES, kv_dtype=name
                    )
                except NotApplicable as reason:
                    refusals.append(str(reason))
                    continue
                summaries.append(run_each(chosen, lambda setup: _check(kit, setup)))
        if len(refusals) == 2 * len(declared_dtypes(kit)):
            raise Fault(
                f"it declares the capability fp8_kv, but {'; '.join(dict.fromkeys(refusals))}",
                "Remove fp8_kv from the capabilities, or support both formats in a backend.",
            )
    return "; ".join(summaries)


def _check(kit: Kit, setup: AttentionSetup) -> None:
    """Without scales, and two layers with theirs, in pools of the size that the memory budget assumes."""
    size, needed = sum(x.nbytes for x in allocate_pool(kit, setup.layout, PAGES).all()), setup.layout.bytes_per_page()
    if size < (PAGES + 1) * needed:
        raise Fault(
            f"{setup}: a page of 8-bit floats takes {needed} bytes, but {PAGES} pages and page 0 have {size}",
            "Store one byte per number; see KVLayout.",
        )
    check_typical(kit, setup, f"keys and values of {setup.layout.dtype}")
    bench, span = Bench(kit, with_scales(setup)), setup.span
    rows, layers = [bench.sequence(), bench.sequence()], range(len(LIMITS))
    bench.step([(rows[0], span + 3), (rows[1], 2)], "prompts with scales per layer", layers=layers)
    bench.step([(row, 1) for row in rows], "output with scales per layer", layers=layers)
    bench.step([(rows[0], 1), (rows[1], span)], "output and a chunk with scales per layer", layers=layers)


def with_scales(setup: AttentionSetup) -> AttentionSetup:
    """The same for two layers; of a pool of 8-bit floats, with the scales whose limits are `LIMITS`."""
    setup = setup.with_layers(len(LIMITS))
    if not is_float8(setup.layout.dtype):
        return setup
    largest = torch.finfo(dtype_of(setup.layout.dtype)).max
    scales = tuple(KVScales(limit.key / largest, limit.value / largest) for limit in LIMITS)
    return replace(setup, layout=replace(setup.layout, scales=scales))
