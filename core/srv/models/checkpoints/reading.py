"""How the bytes of weight files get into memory: mapped or read, by one thread or several. Torch-free.

Must not know any format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from srv.errors import ModelError

Item = TypeVar("Item")


class Reading(NamedTuple):
    """`mapped`: whether files are mapped into memory; else each tensor is read when its turn comes, which is faster
    where mapping reads page by page, as on network file systems. `threads`: that convert and copy tensors at a time."""

    mapped: bool = True
    threads: int = 1


MAPPED = Reading()


def for_each(items: Iterable[Item], work: Callable[[Item], None], threads: int) -> None:
    """Call `work` with each item, in order or by several threads. The first error is raised, and no further item begun.

    On several threads, each should compute on its own.
    """
    if threads == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        calls = [pool.submit(work, item) for item in items]
        try:
            for call in calls:
                call.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class FileBytes:
    """The bytes of a file, which are read when they are asked for. Any thread may ask."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)

    def read(self, begin: int, size: int) -> bytearray:
        """Raises ModelError (truncated) if the file ends before."""
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = os.preadv(self._file, [rest], begin + size - len(rest))
            if count == 0:
                reason = f"it ends at byte {begin + size - len(rest)}, while it is read"
                raise ModelError("truncated", str(self._path), reason, "Start again when nothing writes to the file")
            rest = rest[count:]
        return data

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
