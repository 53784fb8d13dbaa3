"""Keeps manifests pure: while a manifest is imported, imports of torch and packages built on it are refused.

A manifest that imports torch would make `srv plan` slow, and would fail where a vendor's wheel is installed
without its driver. `ImportWall` is an import finder (nothing is patched) that is active only during the import
of a manifest, and only in that thread. It cannot detect a package that this process has already imported; the
probe's child process has imported nothing, so it detects every one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

HEAVY_PREFIXES = ("torch", "triton", "transformers", "jax", "tensorflow")


class ImportWall:
    """`with ImportWall() as wall: ...`; afterwards `wall.attempted` lists the refused imports, even caught ones."""

    def __init__(self) -> None:
        self.attempted: list[str] = []
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
        """The import system's hook: refuse heavy packages and leave the others to the next finders."""
        if threading.get_ident() != self._thread or not fullname.partition(".")[0].startswith(HEAVY_PREFIXES):
            return None
        self.attempted.append(fullname)
        raise ImportError(f"a manifest may not import {fullname}", name=fullname)
