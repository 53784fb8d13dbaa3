"""Keeping a manifest pure: while it is imported, torch and what is built on it cannot be.

A manifest that reaches for torch would make `srv plan` slow, and would fail outright where a vendor's
wheel is installed without its driver. The wall is an import finder of its own (nothing is patched), stands
only around the import of a manifest, and only in that thread. It cannot see a package that this process
had imported before; the probe's child process, which starts empty, sees every one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

HEAVY_PREFIXES = ("torch", "triton", "transformers", "jax", "tensorflow")


class ImportWall:
    """`with ImportWall() as wall: ...`; afterwards `wall.asked` lists what was asked for, refused or caught."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> ImportWall:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import system's hook: refuse heavy packages, leave the rest to the finders behind."""
        if threading.get_ident() != self._thread or not fullname.partition(".")[0].startswith(HEAVY_PREFIXES):
            return None
        self.asked.append(fullname)
        raise ImportError(f"a manifest may not import {fullname}", name=fullname)
