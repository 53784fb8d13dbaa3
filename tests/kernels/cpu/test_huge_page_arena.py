"""Memory for packed weights: allocations do not overlap, are aligned to cache lines, and outlive their arena."""

from __future__ import annotations

import psutil
import pytest
import torch

from srv_kernels.cpu.huge_page_arena import HugePageArena


@pytest.mark.parametrize("sizes", [(1, 63, 64, 65, 4096), (5 * 2**20,) * 8, (40 * 2**20, 10, 40 * 2**20, 10)])
def test_allocations_do_not_overlap(sizes: tuple[int, ...]) -> None:
    arena = HugePageArena()
    parts = [arena.allocate(size) for size in sizes]
    del arena
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert [part.numel() for part in parts] == list(sizes)
    assert all(bool((part == number + 1).all()) for number, part in enumerate(parts))
    assert all(part.data_ptr() % 64 == 0 and part.dtype == torch.uint8 for part in parts)


def test_small_allocations_share_a_chunk() -> None:
    arena = HugePageArena()
    first, second = arena.allocate(100), arena.allocate(100)
    assert second.data_ptr() - first.data_ptr() == 128


def test_allocations_are_private_memory() -> None:
    """Shared memory has huge pages only on systems that were configured for it."""
    part = HugePageArena().allocate(2**20)
    maps = psutil.Process().memory_maps(grouped=False)
    spans = [(*(int(bound, 16) for bound in one.addr.split("-")), one.perms) for one in maps]
    (kind,) = [kind for begin, end, kind in spans if begin <= part.data_ptr() < end]
    assert kind == "rw-p"
