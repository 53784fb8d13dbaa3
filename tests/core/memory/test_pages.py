"""The page allocator: allocation, freeing, and invalid frees."""

from __future__ import annotations

import pytest
from every import every

from srv.errors import IntegrityError
from srv.memory.pages import PageAllocator


def test_allocates_every_page_except_page_zero_once() -> None:
    pages = PageAllocator(0, 5)
    assert sorted(pages.allocate(2) + pages.allocate(3)) == [1, 2, 3, 4, 5]
    assert pages.free_count == 0
    assert pages.free_count == 0


def test_allocating_nothing_takes_nothing() -> None:
    pages = PageAllocator(0, 3)
    assert pages.allocate(0) == ()
    assert pages.free_count == 3


def test_freed_pages_are_allocated_again() -> None:
    pages = PageAllocator(0, 2)
    taken = pages.allocate(2)
    pages.free([taken[0]])
    assert pages.allocate(1) == (taken[0],)


def test_freeing_twice_raises_with_group_and_page() -> None:
    pages = PageAllocator(3, 4)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(IntegrityError, match=f"cache group 3: page {page} was freed twice"):
        pages.free([page])


@every("page", [0, -1, 5])
def test_foreign_pages_are_refused(page: int) -> None:
    with pytest.raises(IntegrityError, match=rf"page {page} is not one of 1\.\.4"):
        PageAllocator(0, 4).free([page])


def test_allocating_too_many_pages_raises_and_allocates_none() -> None:
    pages = PageAllocator(0, 4)
    with pytest.raises(IntegrityError, match="5 pages were requested, 4 of 4 are free"):
        pages.allocate(5)
    assert pages.free_count == 4
