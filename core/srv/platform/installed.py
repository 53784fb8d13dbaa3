"""Entry points of the installed distributions, read from their own files. Torch-free.

`importlib.metadata` tells the same, and most of its time goes into importing what reads e-mail and archives: a
command that says what it would do on another machine would spend a fifth of its time there. So folders are read here,
by the same specification (https://packaging.python.org/specifications/entry-points); where the import path holds more
than folders, an archive or somebody's own finder of distributions, `importlib.metadata` is asked. Must not know what
the groups are for.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

_FOLDER = re.compile(r"(?P<name>[^-]+)(?:-.*)?\.(?P<kind>dist|egg)-info", re.IGNORECASE)
_RUN = re.compile(r"[-_.]+")
_OURS = "[srv."  # a file without it has no section that anybody here asks for


class Entry(NamedTuple):
    """One line of a distribution's `entry_points.txt`. `value`: "module" or "module:attribute"."""

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def module(self) -> str:
        return self.value.partition(":")[0]

    def load(self) -> Any:
        """What it names; whatever importing it raises."""
        module, _, attribute = self.value.partition(":")
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        return found


def entries(group: str) -> tuple[Entry, ...]:
    """The entry points of a group, one of `srv`'s own, in the order of the import path."""
    return tuple(entry for entry in _all(tuple(sys.path)) if entry.group == group)


@functools.lru_cache(maxsize=1)
def _all(import_path: tuple[str, ...]) -> tuple[Entry, ...]:
    """All of them, once for an import path: nobody installs a distribution meanwhile."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if finders != [PathFinder] or any(os.path.isfile(place) for place in import_path):
        return tuple(_asked())
    return tuple(_read(import_path))


def _asked() -> Iterator[Entry]:
    from importlib.metadata import distributions

    seen: set[str] = set()
    for found in distributions():
        if found.name is None or (key := _RUN.sub("_", found.name).lower()) in seen:
            continue
        seen.add(key)
        for each in found.entry_points:
            yield Entry(each.group, each.name, each.value.partition("[")[0].strip(), found.name, found.version)


def _read(import_path: tuple[str, ...]) -> Iterator[Entry]:
    """Of two distributions of one name the first on the path counts, as for whoever imports it."""
    seen: set[str] = set()
    for place in dict.fromkeys(place or os.curdir for place in import_path):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue  # a folder that is not there is no fault of a path
        for name in names:
            folder = _FOLDER.fullmatch(name)
            if folder is None or (key := _RUN.sub("_", folder["name"]).lower()) in seen:
                continue
            seen.add(key)
            text = _text(os.path.join(place, name, "entry_points.txt"))
            if _OURS in text:
                header = "METADATA" if folder["kind"].lower() == "dist" else "PKG-INFO"
                yield from _lines(text, _text(os.path.join(place, name, header)), folder["name"])


def _lines(text: str, header: str, folder: str) -> Iterator[Entry]:
    """The lines of one file; `header` is the distribution's, which may be missing or damaged."""
    said = dict(line.split(": ", 1) for line in header.partition("\n\n")[0].splitlines() if ": " in line)
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            value = value.partition("[")[0].strip()  # what follows are extras, which nobody evaluates any more
            yield Entry(group, name.strip(), value, said.get("Name", folder), said.get("Version", ""))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
