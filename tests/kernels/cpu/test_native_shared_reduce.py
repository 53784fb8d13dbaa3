"""Collective operations through shared memory, with threads as the members of a group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from every import every
from torch import Tensor

from srv_kernels.cpu.library import load

MEMBERS = 3
TIMEOUT_NS = 20_000_000_000
LIBRARY = load().library

pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels here: {load().reason}")


def new_mapping() -> Tensor:
    assert LIBRARY is not None
    return torch.zeros(LIBRARY.srv_shared_group_bytes(MEMBERS) + 64, dtype=torch.uint8)


def on_members(operation: Callable[[int], int]) -> list[int]:
    """The outcomes of operation(member), all at the same time."""
    with ThreadPoolExecutor(MEMBERS) as pool:
        return list(pool.map(operation, range(MEMBERS)))


@every(("type_id", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (3, torch.float16)])
def test_sums_and_gathers_of_any_size(type_id: int, dtype: torch.dtype) -> None:
    mapping = new_mapping()
    address = mapping.data_ptr() + -mapping.data_ptr() % 64
    chunk = 512 * 1024 // dtype.itemsize
    for size in (0, 1, 17, chunk, chunk + 1, 3 * chunk - 1):
        parts = (torch.randn(MEMBERS, size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
        sums, gathered = parts.clone(), torch.zeros(MEMBERS, MEMBERS, size, dtype=dtype)

        def both(member: int, parts: Tensor = parts, sums: Tensor = sums, gathered: Tensor = gathered) -> int:
            assert LIBRARY is not None
            group = (address, MEMBERS, member, TIMEOUT_NS)
            outcome = LIBRARY.srv_shared_all_reduce(type_id, *group, sums[member].data_ptr(), sums[member].numel())
            return outcome or LIBRARY.srv_shared_all_gather(
                *group, parts[member].data_ptr(), parts[member].nbytes, gathered[member].data_ptr()
            )

        assert on_members(both) == [0] * MEMBERS
        first, second, third = parts.float()
        assert torch.equal(sums, (first + second + third).to(dtype).expand_as(sums))
        assert torch.equal(gathered, parts.expand_as(gathered))


def test_the_first_failure_of_a_group_stays() -> None:
    assert LIBRARY is not None
    mapping = new_mapping()
    address = mapping.data_ptr() + -mapping.data_ptr() % 64
    number = torch.ones(1)

    def reduce(member: int) -> int:
        assert LIBRARY is not None
        return LIBRARY.srv_shared_all_reduce(0, address, MEMBERS, member, 1_000_000, number.data_ptr(), 1)

    assert reduce(0) == 2  # 1 + the first member that has not joined
    LIBRARY.srv_shared_abort(address)
    assert [reduce(member) for member in range(MEMBERS)] == [2] * MEMBERS
