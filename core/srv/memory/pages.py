"""The free list of one cache group's pages.

Owns which page ids are free. Must not know who holds the others, nor what a page contains.
Page ids run from 1 to `total`; page 0 takes the writes of padded rows and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable

from srv.errors import IntegrityError


class PageAllocator:
    """Hands out pages of cache group `group` and takes them back, last in, first out."""

    def __init__(self, group: int, total: int) -> None:
        self.group = group
        self.total = total
        self._free = list(range(total, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * total)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` page ids. Raises IntegrityError if fewer are free (`free_count`): the caller evicts first."""
        if count > len(self._free):
            raise IntegrityError(
                f"cache group {self.group}: {count} pages were asked for, {len(self._free)} of {self.total} are free;"
                " the caller must look first, and evict"
            )
        if count == 0:
            return ()
        taken = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back. Raises IntegrityError on a page that is free already or was never handed out."""
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
