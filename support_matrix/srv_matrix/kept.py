"""Results that take long, kept by the contents that they depend on: in files under `build/matrix` of a checkout.

    build/matrix/judged-KEY.json    a checksum, then the result as JSON

KEY is a digest of everything that the result depends on, so that no entry is ever out of date. An entry that cannot be
read is computed again, an entry that has not been used for long is removed, and of several processes that need the same
result at the same time, one computes it and the others wait. This module must not know what is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

ENTRIES = 8  # of one kind, after which the one that was used longest ago is removed
_SKIPPED_FOLDERS = ("__pycache__", "web")  # `web` has the parts of a page
_SKIPPED_SUFFIXES = (".pyc", ".so")
_IMPORT = re.compile(rb"^\s*(?:from|import) (srv_\w+)", re.MULTILINE)
_OWN_IMPORT = re.compile(r"^\s*from srv_matrix(?:\.(\w+))? import ([\w, ]+)", re.MULTILINE)


def kept(folder: Path, kind: str, key: str, form: type[T], make: Callable[[], T]) -> T:
    """The result of `make` for this key, from the folder if it is there. Without a writable folder it is not kept."""
    path = folder / f"{kind}-{key}.json"
    if (stored := _read(path, form)) is not None:
        return stored
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        lock = (folder / f"{kind}.lock").open("w")
    except OSError:
        return make()
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks: both compute
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (stored := _read(path, form)) is not None:  # another process has computed it meanwhile
            return stored
        computed = make()
        _write(path, computed)
        _remove_unused(folder, kind)
    return computed


def _read(path: Path, form: type[T]) -> T | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        checksum, _, content = path.read_bytes().partition(b"\n")
        if checksum.decode(errors="replace") == hashlib.sha256(content).hexdigest():
            os.utime(path)
            return msgspec.json.decode(content, type=form)
    return None


def _write(path: Path, value: object) -> None:
    """Replace the file atomically; one that cannot be written is left out."""
    content = msgspec.json.encode(value)
    new = path.with_suffix(f".{os.getpid()}.new")
    with contextlib.suppress(OSError):
        new.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        new.replace(path)


def _remove_unused(folder: Path, kind: str) -> None:
    entries = sorted(folder.glob(f"{kind}-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*entries[ENTRIES:], *folder.glob(f"{kind}-*.new")):
        path.unlink(missing_ok=True)


def key_of(files: Iterable[Path], *more: str) -> str:
    """A digest of the names and contents of these files, of `more`, and of what is installed."""
    total = hashlib.sha256(sys.version.encode())
    installed = sorted(f"{distribution.name} {distribution.version}" for distribution in distributions())
    plugins = sorted(f"{plugin.group} {plugin.name} {plugin.value}" for plugin in _plugins())
    for text in (*more, *installed, *plugins):
        total.update(hashlib.sha256(text.encode()).digest())
    for path in files:
        total.update(hashlib.sha256(str(path).encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]


def code_files(module: str) -> list[Path]:
    """The files on which a module of this package depends, in a fixed order.

    These are srv, every installed plugin of srv, what these import of packages named `srv_*`, and of this package what
    the module imports.
    """
    pending = ["srv", *(plugin.value.partition(":")[0].partition(".")[0] for plugin in _plugins())]
    files_by_package: dict[str, list[Path]] = {__package__: list(_own_files(module))}
    while pending:
        name = pending.pop()
        if name not in files_by_package:
            files_by_package[name] = files = [path for folder in _folders(name) for path in files_below(folder)]
            pending += {name_bytes.decode() for path in files for name_bytes in _IMPORT.findall(path.read_bytes())}
    return [path for name in sorted(files_by_package) for path in files_by_package[name]]


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder that are neither compiled nor part of a page, in a fixed order."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(folder_name for folder_name in folders if folder_name not in _SKIPPED_FOLDERS)
        yield from (Path(parent) / name for name in sorted(names) if not name.endswith(_SKIPPED_SUFFIXES))


def _plugins() -> list[EntryPoint]:
    return [
        entry_point
        for distribution in distributions()
        for entry_point in distribution.entry_points
        if entry_point.group.startswith("srv.")
    ]


def _folders(package: str) -> list[Path]:
    """Where a package is; nowhere if it is not installed, or is a module."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(location) for location in spec.submodule_search_locations or ()]


def _own_files(module: str) -> Iterator[Path]:
    """A module of this package, and those that it imports."""
    folder, seen, pending = Path(__file__).parent, set[str](), [module]
    while pending:
        name = pending.pop()
        path = folder / f"{name}.py"
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        imported = _OWN_IMPORT.findall(path.read_text(encoding="utf-8"))
        pending += [name for sub, names in imported for name in ([sub] if sub else re.findall(r"\w+", names))]
    yield from (folder / f"{name}.py" for name in sorted({*seen, "__init__"}))
