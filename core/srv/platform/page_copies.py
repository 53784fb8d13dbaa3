"""Copies of whole pages between two KV pools of one layout, for platforms without a kernel for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.platform.interface import KVBuffers


def copy_page_runs(source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
    """See `srv.platform.interface.Platform.copy_pages`. Consecutive pages are copied at once."""
    runs = list(_runs(pages))
    for read, written in zip(source.all(), target.all(), strict=True):
        for begin, to, count in runs:
            written[to : to + count].copy_(read[begin : begin + count], non_blocking=True)


def _runs(pages: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(from, to, count) of runs that are consecutive on both sides."""
    begin = to = count = 0
    for source, target in pages:
        if count and (source, target) == (begin + count, to + count):
            count += 1
            continue
        if count:
            yield begin, to, count
        begin, to, count = source, target, 1
    if count:
        yield begin, to, count
