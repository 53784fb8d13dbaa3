"""The free list of one cache group's pages.

Owns which page ids are free. Must not know who holds the other pages or what a page contains.
Page ids run from 1 to `total`; page 0 receives the writes of padded rows and is never allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

from srv.errors import IntegrityError


class PageAllocator:
    """Allocates and frees the pages of cache group `group`; the page freed last is allocated first."""

    def __init__(self, group: int, total: int) -> None:
        self.group = group
        self.total = total
        self._free = list(range(total, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * total)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` pages. Raises IntegrityError if fewer are free: callers check `free_count` and evict."""
        if count > len(self._free):
            raise IntegrityError(
                f"cache group {self.group}: {count} pages were requested, {len(self._free)} of {self.total} are free;"
                " the caller must check free_count and evict first"
            )
        if count == 0:
            return ()
        allocated = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        for page in allocated:
            self._is_free[page] = 0
        return allocated

    def free(self, pages: Iterable[int]) -> None:
        """Free pages. Raises IntegrityError for a page that is already free or not one of this group."""
        for page in pages:
            if not 1 <= page <= self.total:
                raise IntegrityError(f"cache group {self.group}: page {page} is not one of 1..{self.total}")
            if self._is_free[page]:
                raise IntegrityError(f"cache group {self.group}: page {page} was freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> tuple[int, ...]:
        """The free page ids, for integrity checks."""
        return tuple(self._free)
