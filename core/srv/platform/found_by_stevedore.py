"""Loads all extensions of one entry-point group with stevedore, without its file cache.

stevedore's own list of entry points comes from a cache file in the user's home folder, and does not know which
distribution an entry point belongs to. This manager is given the list instead: `srv.platform.installed` has read it for
every group at once. Importing stevedore takes longer than most commands of `srv`, so it is imported only if the list is
not empty (docs/adr/0026-hooks-and-stevedore.md). Must not know what the extensions are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

from stevedore.extension import ExtensionManager

from srv.errors import PluginError
from srv.platform.installed import Entry
from srv.platform.registry import load


class LoadedExtension(NamedTuple):
    """An extension and where it comes from."""

    entry: Entry
    extension: object


def load_all(group: str, entries: Sequence[Entry]) -> tuple[LoadedExtension, ...]:
    """Load every extension of a group, in the order of `entries`. Raises the PluginError of the first that fails.

    Each is loaded as manifests are: its import may neither import torch nor patch `srv`.
    """
    loaded = [extension.plugin for extension in _Extensions(group, entries)]
    return tuple(LoadedExtension(entry, extension) for entry, extension in zip(entries, loaded, strict=True))


class _CheckedEntryPoint(EntryPoint):
    """An entry point whose `load` checks what the import does. `origin` names its distribution."""

    origin: Entry

    def load(self) -> Any:
        return load(self.origin)


class _Extensions(ExtensionManager[Any]):
    def __init__(self, group: str, entries: Sequence[Entry]) -> None:
        self._found = [_checked(entry) for entry in entries]
        super().__init__(group, on_load_failure_callback=_raise)

    def list_entry_points(self) -> list[EntryPoint]:
        return list(self._found)


def _checked(entry: Entry) -> _CheckedEntryPoint:
    entry_point = _CheckedEntryPoint(entry.name, entry.value, entry.group)
    vars(entry_point).update(origin=entry)  # entry points refuse assignments
    return entry_point


def _raise(manager: ExtensionManager[Any], entry_point: EntryPoint, error: BaseException) -> None:
    """`load` has turned everything into a PluginError that names the distribution; stevedore would only log it."""
    assert isinstance(error, PluginError)
    raise error
