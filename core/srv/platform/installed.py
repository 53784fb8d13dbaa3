"""Entry points of the installed distributions, read from their own files. Torch-free.

`importlib.metadata` returns the same, but spends most of its time on importing parsers for e-mail and archives: a
fifth of the run time of `srv plan`. So folders are read here directly, by the same specification
(https://packaging.python.org/specifications/entry-points). If the import path has anything but folders (an archive, a
custom finder of distributions), `importlib.metadata` is used. Must not know what the groups are for.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

_FOLDER = re.compile(r"(?P<name>[^-]+)(?:-.*)?\.(?P<kind>dist|egg)-info", re.IGNORECASE)
_SEPARATORS = re.compile(r"[-_.]+")
_ON_SRV = re.compile(r"srv\s*(?:\[[^\]]*\]\s*)?(?:$|[(<>=!~;])", re.IGNORECASE)
_SRV_SECTION = "[srv."  # a file without it has no entry point of a group of srv


class Entry(NamedTuple):
    """One line of a distribution's `entry_points.txt`. `value`: "module" or "module:attribute".

    `requires`: what its distribution requires of srv, such as "srv<0.2,>=0.1"; "" if nothing.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    requires: str = ""

    @property
    def module(self) -> str:
        return self.value.partition(":")[0]

    def load(self) -> Any:
        """Import the object that the entry point names; raises what the import raises."""
        module, _, attribute = self.value.partition(":")
        value: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value


def entries(group: str) -> tuple[Entry, ...]:
    """The entry points of one of `srv`'s groups, in the order of the import path."""
    return _entries(tuple(sys.path), group)


def entries_of_srv() -> tuple[Entry, ...]:
    """The entry points of all groups whose name begins with "srv.", in the order of the import path."""
    return tuple(entry for entry in _all_entries(tuple(sys.path)) if entry.group.startswith("srv."))


@functools.lru_cache(maxsize=64)
def _entries(import_path: tuple[str, ...], group: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in _all_entries(import_path) if entry.group == group)


@functools.lru_cache(maxsize=1)
def _all_entries(import_path: tuple[str, ...]) -> tuple[Entry, ...]:
    """All entry points, cached per import path: distributions are not installed while this process runs."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if finders != [PathFinder] or any(os.path.isfile(entry) for entry in import_path):
        return tuple(_from_metadata())
    return tuple(_from_folders(import_path))


def _from_metadata() -> Iterator[Entry]:
    from importlib.metadata import distributions

    seen: set[str] = set()
    for distribution in distributions():
        if distribution.name is None or (key := _SEPARATORS.sub("_", distribution.name).lower()) in seen:
            continue
        seen.add(key)
        requires = _of_srv(distribution.requires or ())
        for entry_point in distribution.entry_points:
            value = entry_point.value.partition("[")[0].strip()
            yield Entry(entry_point.group, entry_point.name, value, distribution.name, distribution.version, requires)


def _from_folders(import_path: tuple[str, ...]) -> Iterator[Entry]:
    """Read the folders of the path. If a distribution occurs twice, the first counts, as it does for imports."""
    seen: set[str] = set()
    for directory in dict.fromkeys(entry or os.curdir for entry in import_path):
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue  # a path may name folders that do not exist
        for name in names:
            folder = _FOLDER.fullmatch(name)
            if folder is None or (key := _SEPARATORS.sub("_", folder["name"]).lower()) in seen:
                continue
            seen.add(key)
            text = _read_text(os.path.join(directory, name, "entry_points.txt"))
            if _SRV_SECTION in text:
                header = "METADATA" if folder["kind"].lower() == "dist" else "PKG-INFO"
                yield from _parse_entry_points(text, _read_text(os.path.join(directory, name, header)), folder["name"])


def _parse_entry_points(text: str, header: str, folder: str) -> Iterator[Entry]:
    """Parse one `entry_points.txt`; `header` is the distribution's metadata, which may be missing or damaged."""
    fields = [line.split(": ", 1) for line in header.partition("\n\n")[0].splitlines() if ": " in line]
    metadata = dict(fields)
    requires = _of_srv(value for name, value in fields if name == "Requires-Dist")
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            value = value.partition("[")[0].strip()  # extras follow in brackets; they are deprecated and ignored
            distribution, version = metadata.get("Name", folder), metadata.get("Version", "")
            yield Entry(group, name.strip(), value, distribution, version, requires)


def _of_srv(requirements: Iterable[str]) -> str:
    """The first of these requirements that is of srv, and not of an extra; "" if none is."""
    return next(
        (
            requirement
            for requirement in requirements
            if _ON_SRV.match(requirement) and "extra" not in requirement.partition(";")[2]
        ),
        "",
    )


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
